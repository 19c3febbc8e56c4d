"""The report of counters and measurements, in PyTorch/XLA's format and under its names.

Reads what `backend.counters` and `backend.measurements` hold. Some counters are worked out when they are asked for, so
that they cost nothing before: `xla::<operator>` (how often an operator ran as part of a program) and
`CreateDataHandles` (arrays that came to be on the device) from the programs and their numbers of runs, and
`DestroyDataHandles` from the arrays that are still alive.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from xlatrainer import config
from xlatrainer.backend import counters, measurements, program, runtime
from xlatrainer.backend.measurements import Measurement

__all__ = [
    "clear_all",
    "clear_counters",
    "clear_metrics",
    "counter_names",
    "counter_value",
    "executed_fallback_ops",
    "metric_data",
    "metric_names",
    "metrics_report",
    "short_metrics_report",
]

SHORT_METRICS = ("CompileTime", "ExecuteTime", "TransferToDeviceTime", "TransferFromDeviceTime")
SHORT_COUNTERS = ("UncachedCompile", "CachedCompile", "MarkStep", "Replay")


class _Arrays:
    before = 0  # arrays on the device when the counters were cleared


def counter_names() -> list[str]:
    """The names of all counters that are not zero, sorted."""
    return sorted(_counters())


def counter_value(name: str) -> int | None:
    """The value of a counter; None if it was never counted.

    Example:
        >>> counter_value("no such counter") is None
        True
    """
    return _counters().get(name)


def metric_names() -> list[str]:
    """The names of all metrics that have samples, sorted."""
    return measurements.names()


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """What a metric holds.

    Returns:
        The number of samples, their sum, and the latest 1,024 of them (`XLA_METRICS_SAMPLES`) as (time, value): times
        are those of `time.monotonic()` in seconds, values of metrics named `...Time` are seconds. None if there is no
        sample.
    """
    found = measurements.of(name)
    return None if found is None else (found.count, found.total, list(zip(found.times, found.values, strict=True)))


def executed_fallback_ops() -> list[str]:
    """The operators that ran on the CPU since they have no lowering, as `aten::name`, sorted."""
    return sorted(name for name in counters.snapshot() if name.startswith(("aten::", "torchvision::")))


def clear_counters() -> None:
    """Set all counters to zero."""
    counters.reset()
    _Arrays.before = runtime.num_live_arrays()
    for each in program.live_programs():
        each.runs = 0


def clear_metrics() -> None:
    """Forget all samples of all metrics."""
    measurements.reset()


def clear_all() -> None:
    """Forget all counters and metrics."""
    clear_counters()
    clear_metrics()


def metrics_report() -> str:
    """All metrics and counters as text.

    Times are sums of units from days to microseconds, `06m09s401ms746.001us`; `ValueRate` is what came together, and
    `Rate` how many samples, in each second of the time that the latest samples span.
    """
    return _report(measurements.names(), _counters())


def short_metrics_report(counter_names: Iterable[str] | None = None, metric_names: Iterable[str] | None = None) -> str:
    """Some metrics and counters as text.

    Args:
        counter_names: of the counters to show; default None: programs compiled, found and replayed, steps, and the
            operators that ran on the CPU.
        metric_names: of the metrics to show; default None: compilation, execution and transfers.
    """
    values = _counters()
    wanted = [*SHORT_COUNTERS, *executed_fallback_ops()] if counter_names is None else list(counter_names)
    shown = SHORT_METRICS if metric_names is None else metric_names
    return _report(shown, {name: values[name] for name in wanted if name in values})


def _report(names: Iterable[str], values: dict[str, int]) -> str:
    lines: list[str] = []
    for name in names:
        found = measurements.of(name)
        if found is not None:
            lines += _metric_lines(name, found)
    for name in sorted(values):
        lines += [f"Counter: {name}", f"  Value: {values[name]}"]
    return "".join(line + "\n" for line in lines)


def _metric_lines(name: str, found: Measurement) -> list[str]:
    values = list(found.values)
    lines = [f"Metric: {name}", f"  TotalSamples: {found.count}", f"  Accumulator: {_text(found.total, found.unit)}"]
    began = found.times[0] - (values[0] if found.unit == "s" else 0)
    span = found.times[-1] - began
    if span > 0:
        lines.append(f"  ValueRate: {_text(sum(values) / span, found.unit)} / second")
        lines.append(f"  Rate: {len(values) / span:.6g} / second")
    shares = (f"{percent:g}%={_text(percentile(values, percent), found.unit)}" for percent in _percents())
    lines.append(f"  Percentiles: {'; '.join(shares)}")
    return lines


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least `percent` of them do not exceed.

    Example:
        >>> percentile(range(1, 101), 5)
        5
    """
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def _percents() -> list[float]:
    """The percentiles that `XLA_METRICS_PERCENTILES` asks for, in percent."""
    setting = str(config.get("metrics_percentiles"))
    try:
        shares = [float(text) for text in setting.split(":")]
    except ValueError:
        shares = [math.nan]
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(
            f"XLA_METRICS_PERCENTILES={setting!r}: it is numbers from 0 to 1 with colons between them, 0.5:0.99 say"
        )
    return [round(100 * share, 9) for share in shares]


def _text(value: float, unit: str) -> str:
    return time_text(value) if unit == "s" else f"{value:.2f}"


def time_text(seconds: float) -> str:
    """A time in the units from days to microseconds, from the largest on that is not zero.

    Example:
        >>> time_text(369.401746001), time_text(0.001032778), time_text(0.0)
        ('06m09s401ms746.001us', '001ms32.778us', '0.000us')
    """
    micros = round(seconds * 1e6, 3)
    text = ""
    for size, name, digits in ((86400e6, "d", 2), (3600e6, "h", 2), (60e6, "m", 2), (1e6, "s", 2), (1e3, "ms", 3)):
        count = int(micros // size)
        micros -= count * size
        if count or text:
            text += f"{count:0{digits}d}{name}"
    return f"{text}{micros:.3f}us"


def _counters() -> dict[str, int]:
    values = Counter(counters.snapshot())
    values["CreateDataHandles"] = values["TransferToDevice"]
    for each in program.live_programs():
        values["CreateDataHandles"] += each.runs * len(each.outputs)
        for node in each.nodes if each.runs else ():
            if node.operation.lower is not None:
                values[f"xla::{node.operation.name.removeprefix('aten::').partition('.')[0]}"] += each.runs
    if values["CreateDataHandles"]:
        gone = values["CreateDataHandles"] + _Arrays.before - runtime.num_live_arrays()
        values["DestroyDataHandles"] = max(gone, 0)
    return {name: count for name, count in values.items() if count}
