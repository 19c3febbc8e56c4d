"""Lengths of time, and a training that ends when they are over."""

from datetime import timedelta
from typing import Any

import pytest

from tests.callbacks.helpers import small_trainer
from tests.trainer.helpers import class_batches
from xlatrainer.callbacks import timer as timer_module
from xlatrainer.callbacks.durations import seconds_of
from xlatrainer.callbacks.frequency import Frequency
from xlatrainer.callbacks.timer import Timer


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10 minutes", 600),
        ("1 minute", 60),
        ("90 s", 90),
        ("90s", 90),
        ("1.5 hours", 5400),
        ("2 days", 172800),
        ("01:02:03:04", 93784),
        ("00:30:00", 1800),
        (timedelta(minutes=3), 180),
        (12, 12),
    ],
)
def test_lengths_of_time(text: Any, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["10 parsecs", "soon", "", 0, -1, "0 s", float("nan")])
def test_what_is_no_length_of_time(text: Any) -> None:
    with pytest.raises(ValueError, match="is no length of time; write"):
        seconds_of(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in which each look takes a second."""
    now = [0.0]

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(timer_module.time, "monotonic", tick)
    return now


@pytest.mark.parametrize(("interval", "steps"), [("batch", 3), ("epoch", 7)])
def test_it_ends_the_training(
    interval: str, steps: int, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = small_trainer()
    trainer.fit(class_batches(), epochs=50, callbacks=[Timer(3, interval, verbose=1)], verbose=0)
    assert trainer.step == steps if interval == "batch" else trainer.step % 7 == 0
    assert trainer.epoch < 5
    assert capsys.readouterr().out.startswith("The time is up")


def test_what_is_left_after_a_checkpoint(clock: list[float]) -> None:
    timer = Timer(10)
    trainer = small_trainer()
    trainer.fit(class_batches(rows=48), callbacks=[timer], verbose=0)
    elapsed = timer.time_elapsed()
    assert 3 < elapsed < 10
    resumed = Timer(10)
    resumed.load_state_dict(timer.state_dict())
    assert resumed.time_remaining() == pytest.approx(10 - elapsed)
    trainer.fit(class_batches(rows=48), callbacks=[resumed], epochs=9, verbose=0)
    assert resumed.time_remaining() == 0
    assert Timer().time_remaining() is None
    with pytest.raises(ValueError, match='interval must be "batch" or "epoch"'):
        Timer(1, "week")


def test_frequencies() -> None:
    steps = Frequency("10 steps")
    steps.begin(step=7)
    assert [step for step in (8, 10, 12, 19, 23, 25, 40) if steps.is_due(step)] == [10, 23, 40]
    assert Frequency("epoch").is_epoch
    assert Frequency("2 hours").seconds == 7200
    for wrong in (0, "0 steps"):
        with pytest.raises(ValueError, match="a number of steps must be at least 1"):
            Frequency(wrong)
    with pytest.raises(ValueError, match="is no length of time"):
        Frequency("batch")
