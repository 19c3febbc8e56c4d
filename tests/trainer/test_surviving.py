"""Ctrl-C, SIGTERM, dying workers, a full disk: what happened is said, and what is kept can be gone on from."""

import contextlib
import gc
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.trainer.helpers import ON_CPU, class_batches, classifier
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.history import History
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.errors import CheckpointError
from xlatrainer.trainer.checkpoints.files import read_manifest
from xlatrainer.trainer.interruption import EXIT_CODE
from xlatrainer.trainer.trainer import Trainer


def trainer(**arguments: Any) -> Trainer:
    return Trainer(classifier(), "sgd", strategy=ON_CPU, **arguments)


def at_batch(number: int, function: Callable[[], Any]) -> LambdaCallback:
    return LambdaCallback(on_train_batch_end=lambda batch, logs: function() if batch == number else None)


def press(number: signal.Signals, times: int = 1) -> Callable[[], None]:
    def sent() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return sent


def saved_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def test_ctrl_c_stops_after_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []
    watched = LambdaCallback(
        on_train_end=lambda logs: called.append("on_train_end"),
        on_epoch_end=lambda epoch, logs: called.append("on_epoch_end"),
    )
    training = trainer(output_dir=tmp_path)
    callbacks = [at_batch(2, press(signal.SIGINT)), watched]
    history = training.fit(class_batches(), epochs=2, verbose=0, callbacks=callbacks, validation_data=class_batches())
    assert history.interrupted
    assert (history.epoch, training.epoch, training.step) == ([], 0, 3)
    assert called == ["on_train_end"]
    assert saved_in(tmp_path) == ["step_00000003"]
    assert read_manifest(tmp_path / "checkpoints" / "step_00000003")["in_epoch"]
    assert "Press Ctrl-C again to stop at once" in capsys.readouterr().err


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = trainer()
    assert training.fit(class_batches(), verbose=0, callbacks=[at_batch(2, press(signal.SIGINT))]).interrupted
    assert not training.fit(class_batches(), verbose=0).interrupted
    assert list(tmp_path.iterdir()) == []


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    training = trainer(output_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        training.fit(class_batches(), verbose=0, callbacks=[at_batch(2, press(signal.SIGINT, 2))])
    assert saved_in(tmp_path) == []


def test_sigterm_saves_and_exits_with_its_code(tmp_path: Path) -> None:
    told: list[str] = []

    class Told(Callback):
        def on_preempt(self, logs: Any) -> None:
            told.append(f"preempted, saved {saved_in(tmp_path)}")

        def on_exception(self, error: BaseException) -> None:
            told.append("exception")

        def on_train_end(self, logs: Any) -> None:
            told.append("end")

    training = trainer(output_dir=tmp_path)
    history = History()
    with pytest.raises(SystemExit) as ended:
        training.fit(
            class_batches(), epochs=2, verbose=0, callbacks=[at_batch(4, press(signal.SIGTERM)), Told(), history]
        )
    assert ended.value.code == EXIT_CODE == 143
    assert history.interrupted
    assert told == ["preempted, saved ['step_00000005']", "end"]
    assert training.step == 5


def test_handlers_are_put_back_and_others_are_left_alone() -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before = handlers()
    inside: list[Any] = []
    trainer().fit(class_batches(), verbose=0, callbacks=[at_batch(0, lambda: inside.extend(handlers()))])
    assert handlers() == before
    assert all(now != then for now, then in zip(inside, before, strict=True))

    def fail() -> None:
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        trainer().fit(class_batches(), verbose=0, callbacks=[at_batch(0, fail)])
    assert handlers() == before

    own: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
    try:
        history = trainer().fit(class_batches(), verbose=0, callbacks=[at_batch(0, press(signal.SIGTERM))])
    finally:
        signal.signal(signal.SIGTERM, before[1])
    assert own == [signal.SIGTERM]
    assert not history.interrupted


def test_in_another_thread_there_are_no_handlers() -> None:
    inside: list[Any] = []
    look = at_batch(0, lambda: inside.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=lambda: trainer().fit(class_batches(), verbose=0, callbacks=[look]))
    thread.start()
    thread.join()
    assert inside == [signal.default_int_handler]


class Deadly(Dataset[tuple[Tensor, Tensor]]):
    """Example 40 sends a signal to the process that loads it, or raises."""

    def __init__(self, number: signal.Signals | None) -> None:
        self.number = number

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 40 and self.number is None:
            raise ValueError("this file is broken")
        if index == 40:
            assert self.number is not None
            os.kill(os.getpid(), self.number)
        return torch.randn(8), torch.tensor(index % 3)


# torch raises in the handler of SIGCHLD, wherever the loop is then. Where that is a destructor or the garbage
# collector, Python ignores the error, and the DataLoader raises it once more when it finds its worker dead.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_worker_that_fails(number: signal.Signals | None, tmp_path: Path) -> None:
    training = trainer(output_dir=tmp_path)
    loader = DataLoader(Deadly(number), 8, num_workers=1)
    error = ValueError if number is None else RuntimeError
    message = "this file is broken" if number is None else "worker|Worker"
    with pytest.raises(error, match=message) as caught:
        training.fit(loader, verbose=0)
    notes = " ".join(caught.value.__notes__)
    caught.value.with_traceback(None)  # it may hold an iterator that could not be finished, with its threads
    del caught
    gc.collect()
    assert f"after {training.step} of its batches, step {training.step}" in notes
    if training.step and saved_in(tmp_path):
        assert f"The newest checkpoint is {tmp_path / 'checkpoints' / saved_in(tmp_path)[-1]}" in notes
    if number is None:  # it comes where the batch is wanted, not where a signal interrupts the loop
        assert training.step == 5
        assert saved_in(tmp_path) == ["step_00000005"]


def test_data_that_fails_at_once_leaves_no_checkpoint(tmp_path: Path) -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            raise ValueError("this file is broken")

    with pytest.raises(ValueError, match="this file is broken") as caught:
        trainer(output_dir=tmp_path).fit(DataLoader(Broken(), 4), verbose=0)
    assert "No checkpoint was written" in caught.value.__notes__
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiprocess
def test_ctrl_c_in_a_worker_is_the_parents_business() -> None:
    training = trainer()
    training.fit(DataLoader(Deadly(signal.SIGINT), 8, num_workers=1), verbose=0)
    assert training.step == 8


def test_an_error_elsewhere_says_what_is_kept(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("mine")

    training = trainer(output_dir=tmp_path, save_freq=2)
    with pytest.raises(KeyError) as caught:
        training.fit(class_batches(), verbose=0, callbacks=[at_batch(4, fail)])
    assert f"The newest checkpoint is {tmp_path / 'checkpoints' / 'step_00000004'}" in caught.value.__notes__
    with pytest.raises(KeyError) as caught:
        trainer().fit(class_batches(), verbose=0, callbacks=[at_batch(4, fail)])
    assert "No checkpoint was written: Trainer(output_dir=...) writes them" in caught.value.__notes__


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, writes fail beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(tmp_path: Path) -> None:
    training = trainer()
    training.save(tmp_path / "state")
    training.fit(class_batches(), verbose=0)
    with files_of_at_most(500), pytest.raises(CheckpointError, match=r"could not be written: .*File too large"):
        training.save(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    other = trainer()
    other.load(tmp_path / "state")
    assert other.step == 0
    training.save(tmp_path / "state")  # there is room again


def test_a_full_disk_during_fit(tmp_path: Path) -> None:
    """The write is in the background: its error comes with the next one, and what is whole stays."""
    training = trainer(output_dir=tmp_path, save_freq=1)
    limits = contextlib.ExitStack()
    fill = at_batch(2, lambda: (training.wait_for_saves(), limits.enter_context(files_of_at_most(500))))
    with limits, pytest.raises(CheckpointError, match=r"step_0000000. could not be written") as caught:
        training.fit(class_batches(), epochs=2, verbose=0, callbacks=[fill])
    assert saved_in(tmp_path) == ["step_00000001", "step_00000002"]
    notes = " ".join(caught.value.__notes__)
    assert "raised by the thread that writes checkpoints in the background" in notes
    assert "The newest checkpoint is" in notes
    assert "step_00000002" in notes


def test_a_failed_write_is_reported_at_the_end_of_fit(tmp_path: Path) -> None:
    training = trainer(output_dir=tmp_path)
    with files_of_at_most(500), pytest.raises(CheckpointError, match="step_00000007 could not be written"):
        training.fit(class_batches(), verbose=0)


def test_callbacks_are_told_of_what_is_saved(tmp_path: Path) -> None:
    saved: list[str] = []
    loaded: list[str] = []

    class Told(Callback):
        def on_save(self, path: Any) -> None:
            saved.append(Path(path).name)
            assert Path(path, "manifest.json").is_file()

        def on_load(self, path: Any) -> None:
            loaded.append(Path(path).name)

    trainer(output_dir=tmp_path).fit(class_batches(), epochs=2, verbose=0, callbacks=[Told()])
    assert saved == ["step_00000007", "step_00000014"]
    trainer(output_dir=tmp_path).fit(class_batches(), epochs=3, verbose=0, callbacks=[Told()], resume_from="last")
    assert loaded == ["step_00000014"]
