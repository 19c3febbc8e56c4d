"""`ExecuteTime` with programs that are done when the test says so, and clocks that stand until it moves them."""

from collections.abc import Iterator

import pytest
import torch

import xlatrainer as xla
from xlatrainer.backend import execution_time, measurements


class Output:
    """Stands for an array that is being computed."""

    def __init__(self, *, ready: bool = False) -> None:
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready

    def is_deleted(self) -> bool:
        return False


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    xla.sync(wait=True)
    measurements.reset()
    execution_time._forget()
    monkeypatch.setattr(execution_time, "time", clock)
    yield clock
    execution_time._forget()


def start(output: Output) -> None:
    execution_time.started(execution_time.starting(), [output], 0)


def samples() -> list[float]:
    found = measurements.of("ExecuteTime")
    return [] if found is None else list(found.values)


def test_what_is_waited_for_is_timed_to_the_end(clock: Clock) -> None:
    output = Output()
    start(output)
    clock.now += 1
    assert samples() == []
    with execution_time.waiting():
        clock.now += 2
        output.ready = True
    assert samples() == [3.0]
    with execution_time.waiting():
        clock.now += 5
    assert samples() == [3.0]


def test_programs_in_a_row_share_the_time(clock: Clock) -> None:
    outputs = [Output(), Output(), Output()]
    for output in outputs:
        start(output)
        clock.now += 1
    with execution_time.waiting():
        clock.now += 3
        for output in outputs:
            output.ready = True
    assert samples() == [2.0, 2.0, 2.0]


def test_a_wait_for_something_earlier_ends_nothing(clock: Clock) -> None:
    start(Output())
    with execution_time.waiting():
        clock.now += 3
    assert samples() == []


def test_an_end_that_nobody_saw_is_no_sample(clock: Clock) -> None:
    output = Output()
    start(output)
    output.ready = True
    clock.now += 50  # the user's own work
    with execution_time.waiting():
        clock.now += 1
    assert samples() == []
    start(output)
    later = Output()
    clock.now += 50
    start(later)  # the first one was done by then
    with execution_time.waiting():
        clock.now += 1
        later.ready = True
    assert samples() == [0.0, 1.0]  # the second start found its output ready at once


def test_what_is_done_when_the_call_returns(clock: Clock) -> None:
    began = execution_time.starting()
    clock.now += 4
    execution_time.started(began, [Output(ready=True)], 0)
    assert samples() == [4.0]


def test_a_program_without_outputs_is_done_at_once(clock: Clock) -> None:
    execution_time.started(execution_time.starting(), [], 0)
    assert samples() == [0.0]


def test_nobody_ever_waits(clock: Clock) -> None:
    for _ in range(execution_time._MOST + 5):
        start(Output())
    assert len(execution_time._Running.began) == 5


def test_a_program_of_the_device_is_timed_until_its_results_are_read() -> None:
    """One that takes much longer than its start."""
    large = torch.randn(400, 400).to("xla")
    xla.sync(wait=True)
    measurements.reset()
    result = large
    for _ in range(30):
        result = result @ large
    result[0, 0].item()
    found = measurements.of("ExecuteTime")
    read = measurements.of("TransferFromDeviceTime")
    assert found is not None
    assert read is not None
    assert found.count == 1
    assert found.total >= read.total / 2  # the read waited for nothing but the program


def test_several_steps_in_one_program_are_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_time, "_SOON", 60.0)
    weight = torch.ones(3).to("xla")
    step = xla.compile(lambda batch: (batch * weight).sum())
    batches = [(torch.ones(3).to("xla"),) for _ in range(3)]
    for _ in range(4):
        step(*batches[0])
    results = step.step.many(batches)
    xla.sync(wait=True)
    measurements.reset()
    results = step.step.many(batches)
    results[-1].item()
    found = measurements.of("ExecuteTime")
    assert found is not None
    assert found.count == 1
