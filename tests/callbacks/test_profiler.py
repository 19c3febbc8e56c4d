"""A trace of chosen steps is on disk, and its path is printed."""

from pathlib import Path

import pytest

from tests.callbacks.helpers import counts, since, small_trainer
from tests.trainer.helpers import class_batches
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.profiler import Profiler, StepTrace


def test_the_steps_are_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = small_trainer("xla")
    batches = class_batches(rows=16 * 6)
    trainer.fit(batches, verbose=0)
    profiler = Profiler(steps=(8, 9), log_dir=tmp_path / "logs")
    states: list[bool] = []
    look = LambdaCallback(on_train_batch_begin=lambda batch, logs: states.append(profiler.trace._is_running))
    before = counts()
    trainer.fit(batches, callbacks=[profiler, look], verbose=0)
    assert since(before) == {"Execute": 6, "UncachedCompile": 0, "TransferFromDevice": 1, "Replay": 6}
    assert states == [False, True, True, False, False, False]
    assert profiler.path is not None
    assert profiler.path.suffixes == [".xplane", ".pb"]
    assert profiler.path.stat().st_size > 1000
    assert capsys.readouterr().out == f"Profile of the steps 8 to 9: {profiler.path}\n"


def test_a_training_that_ends_earlier_ends_the_trace(tmp_path: Path) -> None:
    profiler = Profiler(steps=(1, 100), log_dir=tmp_path)
    small_trainer().fit(class_batches(rows=32), callbacks=[profiler], verbose=0)
    assert profiler.path is not None
    assert profiler.path.exists()


def test_refusals_and_a_profiler_that_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="1 <= first <= last, got"):
        Profiler(steps=(5, 4))
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: None)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: None)
    trace = StepTrace(tmp_path, 1, 1)
    trace.before_step(1)
    with pytest.raises(RuntimeError, match="there is no new"):
        trace.after_step(1)
