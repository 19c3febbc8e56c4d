"""What is shown, and that showing it never waits for the device while batches run."""

import re
from collections.abc import Iterator, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.helpers import ON_CPU, class_batches, classifier
from xlatrainer.callbacks import progbar_logger
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.learning_rate_monitor import LearningRateMonitor
from xlatrainer.callbacks.progbar_logger import ProgbarLogger, resolve_verbose
from xlatrainer.trainer.trainer import Trainer


def trainer() -> Trainer:
    return Trainer(classifier(), "sgd", metrics=["accuracy"], strategy=ON_CPU)


def test_one_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    under_test = trainer()
    under_test.fit(class_batches(), epochs=2, validation_data=class_batches(), verbose=2)
    under_test.evaluate(class_batches(), verbose=2)
    lines = capsys.readouterr().out.splitlines()
    values = r"loss: [\d.]+ - accuracy: [\d.]+"
    validation = r"val_loss: [\d.]+ - val_accuracy: [\d.]+"
    speed = r"[\d.]+m?s/step - [\d,]+ examples/s"
    for number, line in enumerate(lines[:2], start=1):
        assert re.fullmatch(rf"Epoch {number}/2 - [\d.]+s - {values} - {validation} - {speed}", line)
    assert re.fullmatch(rf"Evaluate - [\d.]+s - {values}", lines[2])
    assert len(lines) == 3


def test_the_bar_ends_with_the_values_of_the_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    under_test = trainer()
    history = under_test.fit(class_batches(), validation_data=class_batches(), verbose=1)
    under_test.predict(torch.randn(4, 8), verbose=1)
    out = capsys.readouterr().out
    first, *_, last = out.split("\n")[0].split("\r")[2:]
    assert re.search(r"0/7 \[00:00<\?, compiling\]", first)
    assert re.search(r"7/7 \[00:\d\d<00:00, loss", last)
    assert "Epoch 1/1: 100%" in last
    assert "7/7" in last
    assert f"val_loss: {history.history['val_loss'][0]:.4g}" in last
    assert "examples/s" in last
    assert "Predict: 100%" in out


def test_a_bar_without_a_known_length(capsys: pytest.CaptureFixture[str]) -> None:
    trainer().fit((batch for batch in class_batches()), verbose=1)
    last = capsys.readouterr().out.split("\r")[-1]
    assert re.match(r"Epoch 1/1: 7 \[00:\d\d, loss: ", last)


def test_programs_that_were_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    under_test = Trainer(classifier(width=23), "sgd")
    under_test.fit(class_batches(), epochs=2, verbose=2)  # the last batch is short: another program
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(" examples/s - 2 compiled")
    assert second.endswith(" examples/s")


def test_the_learning_rate_is_shown_if_it_is_in_the_logs(capsys: pytest.CaptureFixture[str]) -> None:
    trainer().fit(class_batches(), callbacks=[LearningRateMonitor()], verbose=2)
    assert "learning_rate: 0.001 -" in capsys.readouterr().out


def test_an_exception_ends_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(batch: int, logs: Any) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        trainer().fit(class_batches(), callbacks=[LambdaCallback(on_train_batch_end=fail)], verbose=1)
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0000123, "0.0123ms"), (0.0123, "12.3ms"), (0.5, "500ms"), (1.5, "1.5s"), (75, "75s")]
)
def test_times(seconds: float, text: str) -> None:
    assert progbar_logger._time_text(seconds) == text


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    under_test = trainer()
    under_test.fit(class_batches(), verbose=0)
    under_test.evaluate(class_batches(), verbose=0)
    under_test.predict(torch.randn(4, 8), verbose=0)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize(("terminal", "level"), [(True, 1), (False, 2)])
def test_auto_is_a_bar_in_a_terminal_only(terminal: bool, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progbar_logger.sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    assert resolve_verbose("auto") == level


@pytest.mark.parametrize("verbose", [3, -1, "loud", None])
def test_other_levels_are_refused(verbose: Any) -> None:
    with pytest.raises(ValueError, match=f"verbose must be .* not {verbose!r}"):
        resolve_verbose(verbose)


class DeviceLogs(MutableMapping[str, float]):
    """Logs that fail the test if they are read while they are not ready."""

    def __init__(self, value: float, is_ready: bool) -> None:
        self.value = value
        self.is_ready = is_ready

    def __getitem__(self, name: str) -> float:
        assert self.is_ready, "the bar waited for the device"
        return self.value

    def __setitem__(self, name: str, value: float) -> None:
        raise AssertionError("the bar changed the logs")

    def __delitem__(self, name: str) -> None:
        raise AssertionError("the bar changed the logs")

    def __iter__(self) -> Iterator[str]:
        return iter(["loss"])

    def __len__(self) -> int:
        return 1


def test_the_newest_values_that_are_ready(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The device is two batches behind: batch 2 shows the values of batch 0."""
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr(progbar_logger.time, "perf_counter", lambda: next(clock))
    bar = begun_bar(steps=5)
    logs = [DeviceLogs(0.5, True), DeviceLogs(0.25, False), DeviceLogs(0.125, False)]
    for batch, values in enumerate(logs):
        bar.on_train_batch_end(batch, values)
    shown = capsys.readouterr().out.split("\r")
    assert "3/5" in shown[-1]
    assert "loss: 0.5" in shown[-1]
    logs[1].is_ready = True
    bar.on_train_batch_end(3, DeviceLogs(0.0625, False))
    assert "loss: 0.25" in capsys.readouterr().out
    make_ready(bar)
    bar.on_epoch_end(0, DeviceLogs(1.5, True))
    assert "loss: 1.5" in capsys.readouterr().out


def make_ready(bar: ProgbarLogger) -> None:
    for logs in bar._recent:
        assert isinstance(logs, DeviceLogs)
        logs.is_ready = True


def test_no_more_than_a_few_refreshes_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progbar_logger.time, "perf_counter", lambda: now[0])
    bar = begun_bar(steps=1000)
    capsys.readouterr()
    for batch in range(1000):  # two seconds of two milliseconds a batch
        now[0] += 0.002
        bar.on_train_batch_end(batch, DeviceLogs(0.5, True))
    assert 4 <= capsys.readouterr().out.count("\r") <= 16
    bar.on_epoch_end(0, DeviceLogs(0.5, True))


def begun_bar(steps: int) -> ProgbarLogger:
    bar = ProgbarLogger()
    under_test = trainer()
    bar.set_trainer(under_test)
    bar.set_params({"epochs": 1, "steps": steps, "verbose": 1})
    bar.on_train_begin({})
    bar.on_epoch_begin(0, {})
    under_test.num_examples += 128
    return bar
