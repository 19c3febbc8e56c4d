"""The metrics report has PyTorch/XLA's format, and says what happened."""

import gc
import re
import warnings
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch import nn

import xlatrainer as xla
from xlatrainer import config, debug
from xlatrainer.backend import execution_time, measurements

NAMES = {
    "CompileTime",
    "ExecuteTime",
    "InputOutputAliasCount",
    "TraceTime",
    "TransferFromDeviceTime",
    "TransferToDeviceTime",
}
TIME = r"(\d\dd)?(\d\dh)?(\d\dm)?(\d\ds)?(\d\d\dms)?\d+\.\d{3}us"
BLOCK = re.compile(
    rf"Metric: (\w+)\n  TotalSamples: (\d+)\n  Accumulator: (?:{TIME}|\d+\.\d\d)\n"
    rf"(?:  ValueRate: (?:{TIME}|\d+\.\d\d) / second\n  Rate: [\d.e+]+ / second\n)?"
    rf"  Percentiles: 1%=\S+; 5%=\S+; 10%=\S+; 20%=\S+; 50%=\S+; 80%=\S+; 90%=\S+; 95%=\S+; 99%=\S+\n"
)


@pytest.fixture(autouse=True)
def _cleared() -> Iterator[None]:
    xla.sync()
    gc.collect()  # what other tests left behind must not go while a test counts
    debug.clear_all()
    yield
    debug.clear_all()


WIDTHS = count(7)


def train(steps: int) -> None:
    """Steps of a small model, of a shape that nothing else compiles."""
    width = next(WIDTHS)
    model = nn.Linear(width, 3).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(11, width).to("xla")).square().sum().backward()
        optimizer.step()
        xla.sync()


def test_counts_and_samples_of_a_training() -> None:
    kept = torch.ones(2).to("xla")
    train(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it has no lowering is said once in a process
        torch.linalg.ldl_factor(torch.eye(3, device="xla"))
    assert set(debug.metric_names()) == NAMES
    executions, total, samples = debug.metric_data("ExecuteTime") or (0, 0.0, [])
    assert 0 < executions == len(samples) <= (debug.counter_value("Execute") or 0)  # of those that are waited for
    assert total == pytest.approx(sum(value for _, value in samples))
    assert [when for when, _ in samples] == sorted(when for when, _ in samples)
    compiled = debug.metric_data("CompileTime")
    assert compiled is not None
    assert compiled[0] == debug.counter_value("UncachedCompile")
    aliased = debug.metric_data("InputOutputAliasCount")
    assert aliased is not None
    assert max(value for _, value in aliased[2]) == 4  # two parameters, two momenta
    assert debug.counter_value("MarkStep") == 6
    assert debug.counter_value("xla::addmm") == 6
    created, destroyed = debug.counter_value("CreateDataHandles"), debug.counter_value("DestroyDataHandles")
    assert created is not None
    assert destroyed is not None
    assert 0 < destroyed < created
    assert kept.numel() == 2
    assert debug.executed_fallback_ops() == ["aten::linalg_ldl_factor_ex"]
    assert debug.counter_value("aten::linalg_ldl_factor_ex") == 1


def test_the_report() -> None:
    train(3)
    torch.ones(2, device="xla").tolist()  # runs the program that it waits for
    report = debug.metrics_report()
    assert {name for name, *_ in BLOCK.findall(report)} == NAMES
    rest = BLOCK.sub("", report)
    assert re.fullmatch(r"(Counter: \S+\n  Value: \d+\n)+", rest)
    assert dict(re.findall(r"Counter: (\S+)\n  Value: (\d+)", rest)) == {
        name: str(debug.counter_value(name)) for name in debug.counter_names()
    }


def test_the_short_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_time, "_SOON", 60.0)  # however long this process is kept from waiting
    train(3)
    xla.sync(wait=True)
    report = debug.short_metrics_report()
    assert re.findall(r"Metric: (\w+)", report) == list(debug.metrics.SHORT_METRICS[:3])  # nothing was read
    assert re.findall(r"Counter: (\S+)", report) == ["CachedCompile", "MarkStep", "UncachedCompile"]
    assert "Counter: MarkStep\n  Value: 4\n" in report
    chosen = debug.short_metrics_report(counter_names=["MarkStep", "Nothing"], metric_names=["TraceTime"])
    assert chosen.startswith("Metric: TraceTime\n  TotalSamples: 3\n")
    assert chosen.endswith("Counter: MarkStep\n  Value: 4\n")


def test_the_percentiles_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in range(1, 101):
        measurements.record("Something", value, "")
    assert "Percentiles: 1%=1.00; 5%=5.00; 10%=10.00; 20%=20.00; 50%=50.00; 80%=80.00;" in debug.metrics_report()
    monkeypatch.setenv("XLA_METRICS_PERCENTILES", "0.25:0.999:1")
    assert "  Percentiles: 25%=25.00; 99.9%=100.00; 100%=100.00\n" in debug.metrics_report()
    for wrong in ("25:50", "median", ""):
        monkeypatch.setenv("XLA_METRICS_PERCENTILES", wrong)
        with pytest.raises(ValueError, match=f"XLA_METRICS_PERCENTILES='{wrong}': it is numbers from 0 to 1"):
            debug.metrics_report()


def test_as_many_samples_are_kept_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_METRICS_SAMPLES", "3")
    for value in range(5):
        measurements.record("Something", value, "")
    count, total, samples = debug.metric_data("Something") or (0, 0.0, [])
    assert (count, total, [value for _, value in samples]) == (5, 10, [2, 3, 4])
    monkeypatch.setenv("XLA_METRICS_SAMPLES", "0")
    with pytest.raises(ValueError, match="XLA_METRICS_SAMPLES=0: at least 1 sample"):
        measurements.record("Something else", 1.0)


def test_clearing() -> None:
    train(1)
    debug.clear_counters()
    assert debug.counter_names() == []
    assert debug.counter_value("xla::addmm") is None
    assert debug.metric_names()
    debug.clear_metrics()
    assert debug.metric_names() == []
    assert debug.metric_data("ExecuteTime") is None


def test_operators_of_replayed_steps_count() -> None:
    weight = torch.ones(13, device="xla")
    step = xla.compile(lambda x: (x * weight).cos())
    for _ in range(7):
        step(torch.ones(13, device="xla"))
    if config.get("replay") == "on":
        assert debug.counter_value("Replay") == 5
    assert debug.counter_value("xla::cos") == 7


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.000us"),
        (999e-9, "0.999us"),
        (0.001032778, "001ms32.778us"),
        (61.5, "01m01s500ms0.000us"),
        (369.401746001, "06m09s401ms746.001us"),
        (2 * 86400.0 + 1e-6, "02d00h00m00s000ms1.000us"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert debug.metrics.time_text(seconds) == text


def test_percentiles_and_the_latest_samples() -> None:
    for value in range(1, 101):
        measurements.record("things", value, "")
    assert "  Accumulator: 5050.00\n" in debug.metrics_report()
    assert "1%=1.00; 5%=5.00; 10%=10.00; 20%=20.00; 50%=50.00; 80%=80.00; 90%=90.00; 95%=95.00; 99%=99.00" in (
        debug.metrics_report()
    )
    for value in range(5000):
        measurements.record("things", value, "")
    count, total, samples = debug.metric_data("things") or (0, 0.0, [])
    assert (count, total, len(samples)) == (5100, 5050 + 4999 * 2500, 1024)
    assert samples[-1][1] == 4999
