"""`ExecuteTime`: how long programs run, seen where somebody waits for them anyway.

The call that starts a program returns before the program is done, and the device runs one after the other. When a wait
ends with the latest program done, the time since the first of those began that were not done before is shared out
between them. A program that nobody waited for was done at some time that nobody saw: it has no sample, so there may be
fewer samples than executions.

May import: measurements.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from xlatrainer.backend import measurements

__all__ = ["started", "starting", "waiting"]

_SOON = 1e-3  # seconds after its start within which a program that is found done counts as waited for
_MOST = 1000  # programs that are waited for at once


class _Running:
    """The programs that were started and not yet seen to be done."""

    lock = threading.Lock()
    began: list[float] = []
    returned = 0.0
    latest: Any = None  # an output of the latest one, the smallest: it stays on the device for as long


def starting() -> float:
    """A program is about to start; returns the time."""
    with _Running.lock:
        if _is_done() or len(_Running.began) >= _MOST:
            _forget()
    return time.perf_counter()


def started(began: float, outputs: list[Any], smallest: int) -> None:
    """A program was started at `began` that gives `outputs`, of which the one at `smallest` may be kept."""
    with _Running.lock:
        _Running.began.append(began)
        _Running.returned = time.perf_counter()
        _Running.latest = outputs[smallest] if outputs else None
        if _is_done():
            _settle()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """A block in which somebody waits for something."""
    with _Running.lock:
        if _is_done() and time.perf_counter() - _Running.returned > _SOON:
            _forget()
    yield
    with _Running.lock:
        if _is_done():
            _settle()


def _is_done() -> bool:
    latest = _Running.latest
    return bool(_Running.began) and (latest is None or latest.is_deleted() or latest.is_ready())


def _settle() -> None:
    share = (time.perf_counter() - _Running.began[0]) / len(_Running.began)
    for _ in _Running.began:
        measurements.record("ExecuteTime", share)
    _forget()


def _forget() -> None:
    _Running.began.clear()
    _Running.latest = None
