"""A training that dies and is started again gives the losses of one that did not, and cleans up in the end."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.callbacks.helpers import small_trainer
from tests.trainer.helpers import DEVICES, class_batches
from xlatrainer.callbacks.backup_and_restore import BackupAndRestore
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.csv_logger import CSVLogger
from xlatrainer.callbacks.early_stopping import EarlyStopping
from xlatrainer.callbacks.ema import EMA
from xlatrainer.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from xlatrainer.callbacks.json_logger import JSONLogger
from xlatrainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from xlatrainer.callbacks.terminate_on_nan import TerminateOnNaN
from xlatrainer.trainer.trainer import Trainer


class Dies(Callback):
    """Notes the loss of each step, and fails in or interrupts the given one."""

    def __init__(self, losses: list[float], step: int = 0, how: str = "error") -> None:
        self.losses = losses
        self.step = step
        self.how = how

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        del self.losses[self.trainer.step - 1 :]
        self.losses.append(logs["loss"])
        if self.trainer.step == self.step and self.how == "error":
            raise OSError("the machine is gone")
        if self.trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def shuffled() -> DataLoader[Any]:
    inputs, targets = (torch.cat(column) for column in zip(*class_batches(), strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)


def train(trainer: Trainer, *callbacks: Callback) -> None:
    trainer.fit(shuffled(), epochs=4, callbacks=callbacks, verbose=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("save_freq", "how"), [("epoch", "error"), (2, "error"), ("epoch", "interrupt")])
def test_it_goes_on_as_if_nothing_had_happened(device: str, save_freq: Any, how: str, tmp_path: Path) -> None:
    expected: list[float] = []
    torch.manual_seed(5)
    train(small_trainer(device), Dies(expected))
    assert len(expected) == 28
    losses: list[float] = []
    torch.manual_seed(5)
    for step in (10, 19, 0):
        backup = BackupAndRestore(tmp_path, save_freq)
        trainer = small_trainer(device)
        if step and how == "error":
            with pytest.raises(OSError, match="the machine is gone"):
                train(trainer, Dies(losses, step), backup)
        else:
            train(trainer, Dies(losses, step, how), backup)
        assert Path(backup.path).exists() == (step > 0)
    assert losses == expected
    assert (trainer.step, trainer.epoch) == (28, 4)


class Interrupts(Callback):
    """Presses Ctrl-C in a batch of an epoch, and notes the loss of all batches."""

    def __init__(self, losses: dict[tuple[int, int], float], epoch: int = -1, batch: int = -1) -> None:
        self.losses = losses
        self.place = (epoch, batch)

    def on_epoch_begin(self, epoch: int, logs: Any) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.losses[self.epoch, batch] = logs["loss"]
        if (self.epoch, batch) == self.place:
            os.kill(os.getpid(), signal.SIGINT)


def test_within_a_group_of_accumulated_batches(tmp_path: Path) -> None:
    schedule = {0: 3, 2: 2}
    expected: dict[tuple[int, int], float] = {}
    torch.manual_seed(0)
    undisturbed = small_trainer("xla")
    train(undisturbed, GradientAccumulationScheduler(schedule), Interrupts(expected))
    losses: dict[tuple[int, int], float] = {}
    torch.manual_seed(0)
    for place in ((0, 1), (2, 2), (-1, -1)):
        trainer = small_trainer("xla")
        train(
            trainer,
            GradientAccumulationScheduler(schedule),
            Interrupts(losses, *place),
            BackupAndRestore(tmp_path),
        )
    assert losses == expected
    assert (trainer.step, trainer.epoch) == (undisturbed.step, 4)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_come_in_the_end_are_not_in_the_backup(device: str, tmp_path: Path) -> None:
    """An interrupted training has its best or averaged weights in the model; what goes on is the training before."""

    def run(losses: dict[tuple[int, int], float], *place: int) -> Trainer:
        trainer = small_trainer(device, learning_rate=0.3)
        train(
            trainer,
            Curve(),
            EarlyStopping(patience=9, restore_best_weights=True),
            EMA(0.5),
            Interrupts(losses, *place),
            BackupAndRestore(tmp_path),
        )
        return trainer

    expected: dict[tuple[int, int], float] = {}
    losses: dict[tuple[int, int], float] = {}
    torch.manual_seed(0)
    undisturbed = run(expected)
    torch.manual_seed(0)
    run(losses, 2, 3)
    trainer = run(losses)
    assert losses == expected
    for name, value in undisturbed.model.state_dict().items():
        assert torch.equal(value.cpu(), trainer.model.state_dict()[name].cpu())


def test_a_training_that_was_stopped_has_ended(tmp_path: Path) -> None:
    trainer = small_trainer(learning_rate=0.0)
    train(trainer, EarlyStopping("loss", min_delta=1.0), BackupAndRestore(tmp_path))
    assert trainer.epoch == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:the loss")
def test_a_training_that_diverges_leaves_the_last_sound_backup(tmp_path: Path) -> None:
    class Diverges(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any) -> None:
            if epoch == 2:
                self.trainer.model.get_parameter("3.weight").data.fill_(float("nan"))

    train(small_trainer(), Diverges(), TerminateOnNaN(), BackupAndRestore(tmp_path))
    sound = small_trainer()
    sound.load(tmp_path / "backup")
    assert (sound.step, sound.epoch) == (14, 2)
    assert all(bool(torch.isfinite(value).all()) for value in sound.model.state_dict().values())


def test_a_kept_backup_and_an_explicit_checkpoint(tmp_path: Path) -> None:
    trainer = small_trainer()
    train(trainer, BackupAndRestore(tmp_path, delete_checkpoint=False))
    again = small_trainer()
    train(again, BackupAndRestore(tmp_path, delete_checkpoint=False))
    assert (again.step, again.epoch) == (28, 4)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    other = small_trainer()
    other.fit(shuffled(), callbacks=[], verbose=0)
    other.save(tmp_path / "other")
    chosen = small_trainer()
    chosen.fit(
        shuffled(),
        epochs=2,
        callbacks=[BackupAndRestore(tmp_path)],
        resume_from=tmp_path / "other",
        verbose=0,
    )
    assert (chosen.step, chosen.epoch) == (14, 2)


class Decisions(Callback):
    """Notes what was decided in each epoch; the losses of the small problem are replaced by a curve with plateaus."""

    CURVE = (3.0, 2.0, 2.0, 1.5, 1.5, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

    def __init__(self, noted: dict[int, tuple[float, int, int]], callbacks: list[Any]) -> None:
        self.noted = noted
        self.callbacks = callbacks

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        stopping, plateau = self.callbacks
        self.noted[epoch] = (self.trainer.learning_rate, stopping.wait, plateau.wait)


class Curve(Callback):
    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        logs["val_loss"] = Decisions.CURVE[epoch]


def test_callbacks_decide_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def run(noted: dict[int, tuple[float, int, int]], *others: Callback) -> Trainer:
        trainer = small_trainer("xla", learning_rate=0.1)
        deciding: list[Any] = [
            EarlyStopping(patience=4, restore_best_weights=True),
            ReduceLROnPlateau(factor=0.5, patience=2, cooldown=1),
        ]
        callbacks = [Curve(), *deciding, Decisions(noted, deciding), *others]
        trainer.fit(class_batches(), epochs=12, callbacks=callbacks, verbose=0)
        return trainer

    expected: dict[int, tuple[float, int, int]] = {}
    undisturbed = run(expected)
    assert len({rate for rate, _, _ in expected.values()}) >= 3
    assert len(expected) == 11
    noted: dict[int, tuple[float, int, int]] = {}
    for step in (17, 40, 66):
        with pytest.raises(OSError, match="the machine is gone"):
            run(noted, Dies([0.0] * 100, step), BackupAndRestore(tmp_path, save_freq=3))
    trainer = run(noted, BackupAndRestore(tmp_path, save_freq=3))
    assert noted == expected
    assert trainer.epoch == 11
    for name, value in undisturbed.model.state_dict().items():
        assert torch.equal(value.cpu(), trainer.model.state_dict()[name].cpu())


def test_log_files_are_those_of_one_training(tmp_path: Path) -> None:
    csv, lines = tmp_path / "log.csv", tmp_path / "log.jsonl"

    def run(folder: Path, *others: Callback) -> None:
        small_trainer().fit(
            class_batches(),
            epochs=4,
            callbacks=[CSVLogger(folder / csv.name), JSONLogger(folder / lines.name), *others],
            verbose=0,
        )

    run(tmp_path / "expected")
    for step in (9, 24):
        with pytest.raises(OSError, match="the machine is gone"):
            run(tmp_path, Dies([0.0] * 100, step), BackupAndRestore(tmp_path, save_freq="1 steps"))
        for path in (csv, lines):  # what a kill may leave behind
            path.write_text(path.read_text() + ('{"epo' if path is lines else "1"))
    run(tmp_path, BackupAndRestore(tmp_path))
    for path in (csv, lines):
        assert path.read_text() == (tmp_path / "expected" / path.name).read_text()
    run(tmp_path)
    assert len(lines.read_text().splitlines()) == 4
