"""Measurements of what the device did: how long each compilation, transfer and start of a program took.

Beside `counters`, with the same life: a name comes up with its first sample, and `reset` forgets all. Of each name the
number of samples, their sum and the latest samples are held, as many as `XLA_METRICS_SAMPLES` said at the first one.
Taking a sample costs about a microsecond.

May import: config.
"""

import threading
import time
from collections import deque
from typing import Any

from xlatrainer import config

__all__ = ["Measurement", "names", "of", "record", "reset", "timed"]


class Measurement:
    """All samples of one name.

    Attributes:
        unit: "s" for seconds, "" for plain numbers.
        kept: how many samples are held.
        count: how many samples there were; `total`: their sum.
        times: `time.monotonic()` of the latest samples; `values`: the samples themselves.
    """

    def __init__(self, unit: str, kept: int) -> None:
        self.unit = unit
        self.kept = kept
        self.count = 0
        self.total = 0.0
        self.times: deque[float] = deque(maxlen=kept)
        self.values: deque[float] = deque(maxlen=kept)


_lock = threading.Lock()
_measurements: dict[str, Measurement] = {}


def record(name: str, value: float, unit: str = "s") -> None:
    """Take a sample."""
    with _lock:
        found = _measurements.get(name)
        if found is None:
            found = _measurements[name] = Measurement(unit, _number_kept())
        found.count += 1
        found.total += value
        found.times.append(time.monotonic())
        found.values.append(value)


def _number_kept() -> int:
    number = int(config.get("metrics_samples"))
    if number < 1:
        raise ValueError(f"XLA_METRICS_SAMPLES={number}: at least 1 sample of each metric is kept")
    return number


class timed:
    """Take the length of a `with` block as a sample, unless it raises."""

    __slots__ = ("_name", "_start")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            record(self._name, time.perf_counter() - self._start)


def names() -> list[str]:
    """The names that have samples, sorted."""
    with _lock:
        return sorted(_measurements)


def of(name: str) -> Measurement | None:
    """A copy of what was measured under `name`; None if there is no sample."""
    with _lock:
        found = _measurements.get(name)
        if found is None:
            return None
        copy = Measurement(found.unit, found.kept)
        copy.count, copy.total = found.count, found.total
        copy.times.extend(found.times)
        copy.values.extend(found.values)
        return copy


def reset() -> None:
    """Forget all samples."""
    with _lock:
        _measurements.clear()
