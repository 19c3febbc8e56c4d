"""fit(resume_from=...): a training that was stopped at any step gives the numbers of one that was not, bit for bit."""

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.trainer.helpers import ON_CPU, class_batches, classifier, strategy_on
from xlatrainer.backend import counters
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.early_stopping import EarlyStopping
from xlatrainer.callbacks.history import History
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from xlatrainer.errors import CheckpointError
from xlatrainer.trainer.checkpoints.files import read_manifest
from xlatrainer.trainer.trainer import Trainer

EPOCHS = 3


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Examples with noise that is drawn anew each time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.inputs = torch.randn(50, 8, generator=generator)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.inputs[index]
        return row + 0.1 * torch.randn(8), row[:3].argmax()


def rows() -> DataLoader[Any]:
    inputs = Augmented().inputs
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), 8, shuffle=True)


def with_dropout() -> nn.Module:
    return nn.Sequential(*classifier(), nn.Dropout(0.2))


class Losses(Callback):
    """The loss of every batch; presses Ctrl-C after a given number of batches."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.losses: list[float] = []
        self.stop_after = stop_after

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        self.losses.append(logs["loss"])
        if len(self.losses) == self.stop_after:
            os.kill(os.getpid(), signal.SIGINT)


def fit(
    trainer: Trainer, loader: Any, stop_after: int | None = None, seed: int = 7, **arguments: Any
) -> tuple[list[float], History]:
    torch.manual_seed(seed)
    losses = Losses(stop_after)
    callbacks = [*arguments.pop("callbacks", ()), losses]
    history = trainer.fit(loader, epochs=EPOCHS, verbose=0, callbacks=callbacks, **arguments)
    return losses.losses, history


def compare_with_unbroken(
    tmp_path: Path,
    stops: list[int],
    make: Callable[..., Trainer],
    loader: Callable[[], Any] = rows,
    arguments: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Stop after so many batches, each time in a new Trainer that resumes, and compare with one that is not stopped.

    Each Trainer after the first one starts from other weights and random states than the one that was stopped.
    """
    expected, unbroken = fit(make(), loader(), **arguments())
    losses: list[float] = []
    for number, stop in enumerate([*stops, None]):
        trainer = make(output_dir=tmp_path, save_freq=10_000)
        if number:
            for parameter in trainer.model.parameters():
                nn.init.zeros_(parameter)
        more, history = fit(trainer, loader(), stop, seed=7 + number, resume_from="last", **arguments())
        assert history.interrupted == (stop is not None)
        losses += more
    assert losses == expected
    assert history.history == unbroken.history
    assert history.epoch == unbroken.epoch


def trainer_on(device: str, optimizer: Any = "adam", **arguments: Any) -> Trainer:
    return Trainer(with_dropout(), optimizer, metrics=["accuracy"], strategy=strategy_on(device), **arguments)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_stopped_often(device: str, tmp_path: Path) -> None:
    """In the middle of an epoch, after its last batch, after its first one, and twice with nothing done between."""
    compare_with_unbroken(
        tmp_path,
        [3, 4, 1, 5, 1] if device == "cpu" else [3, 4],
        partial(trainer_on, device, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        arguments=lambda: {"validation_data": rows(), "num_sanity_val_steps": 2},
    )


@pytest.mark.multiprocess
def test_shuffled_and_augmented_by_workers(tmp_path: Path) -> None:
    compare_with_unbroken(
        tmp_path,
        [5, 7],
        partial(trainer_on, "cpu"),
        lambda: DataLoader(Augmented(), 8, shuffle=True, num_workers=2),
    )


def test_augmented_in_this_process(tmp_path: Path) -> None:
    compare_with_unbroken(
        tmp_path, [5, 7], partial(trainer_on, "cpu"), lambda: DataLoader(Augmented(), 8, shuffle=True)
    )


FEATURES: dict[str, dict[str, Any]] = {
    "loss scale": {"precision": "fp16-mixed"},
    "padding": {"pad_last_batch": True},
    "accumulation": {"gradient_accumulation_steps": 3, "global_clipnorm": 1.0},
    "averages": {"use_ema": True, "ema_momentum": 0.9},
    "schedule": {"scheduler": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)},
    "several steps in a program": {"steps_per_execution": 3},
}


@pytest.mark.parametrize("name", FEATURES)
def test_with_what_else_has_a_state(name: str, tmp_path: Path) -> None:
    stops = [3] if name.startswith("several") else [4, 2, 5]  # of its programs: after the last batch of an epoch
    device = "xla" if name.startswith("several") else "cpu"
    compare_with_unbroken(
        tmp_path,
        stops,
        partial(trainer_on, device, **FEATURES[name]),
        arguments=lambda: {"validation_data": rows()},
    )


def test_with_callbacks_that_decide(tmp_path: Path) -> None:
    def arguments() -> dict[str, Any]:
        plateau = ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10.0)
        stopping = EarlyStopping(patience=5, restore_best_weights=True)
        return {"callbacks": [plateau, stopping], "validation_data": rows()}

    compare_with_unbroken(tmp_path, [9, 5], partial(trainer_on, "cpu"), arguments=arguments)


def test_the_best_weights_of_before_come_back(tmp_path: Path) -> None:
    """The best epoch was before the training was stopped."""

    def worse(epoch: int, logs: Any) -> None:
        logs["val_loss"] = float(epoch)

    def arguments() -> dict[str, Any]:
        return {"callbacks": [LambdaCallback(on_epoch_end=worse), EarlyStopping(restore_best_weights=True, patience=9)]}

    whole = trainer_on("cpu")
    fit(whole, rows(), **arguments())
    fit(trainer_on("cpu", output_dir=tmp_path), rows(), 9, **arguments())
    resumed = trainer_on("cpu", output_dir=tmp_path)
    fit(resumed, rows(), seed=8, resume_from="last", **arguments())
    assert torch.equal(resumed.model[0].weight, whole.model[0].weight)


def test_at_a_url() -> None:
    make = partial(trainer_on, "cpu", output_dir="memory://runs/first", save_freq=2, max_to_keep=2)
    expected, unbroken = fit(trainer_on("cpu"), rows())
    first, _ = fit(make(), rows(), 9)
    second, history = fit(make(), rows(), seed=8, resume_from="last")
    assert first + second == expected
    assert history.history == unbroken.history


def test_what_saving_costs(tmp_path: Path) -> None:
    """Copies on the device and reads by the thread, no program and no step that is not replayed."""
    counted = []
    for folder in (None, tmp_path):
        torch.manual_seed(7)
        trainer = Trainer(classifier(width=27), "adam", output_dir=folder, save_freq=2)
        trainer.fit(class_batches(rows=16 * 8), epochs=2, verbose=0)
        before = counters.snapshot()
        trainer.fit(class_batches(rows=16 * 8), epochs=2, verbose=0)
        now = counters.snapshot()
        counted.append({name: now[name] - before.get(name, 0) for name in now})
    plain, saving = counted
    for name in ("Execute", "UncachedCompile", "CachedCompile", "Replay", "TransferToDevice"):
        assert saving.get(name, 0) == plain.get(name, 0), name
    tensors = 6 + 2 + 2 * 5  # parameters and statistics of the norm, Adam's state (its steps are on the CPU), metrics
    assert saving["TransferFromDevice"] > plain["TransferFromDevice"] + 8 * tensors


def test_an_epoch_that_is_not_the_checkpoints(tmp_path: Path) -> None:
    fit(trainer_on("cpu", output_dir=tmp_path), rows(), 9)
    with pytest.raises(ValueError, match="initial_epoch=2, but .*step_00000009 goes on with epoch 1: leave"):
        fit(trainer_on("cpu", output_dir=tmp_path), rows(), resume_from="last", initial_epoch=2)


def test_saved_during_a_validation_with_averages(tmp_path: Path) -> None:
    """The validation begins again, and the weights are the model's own."""
    expected, unbroken = fit(trainer_on("cpu", use_ema=True), rows(), validation_data=rows())
    trainer = trainer_on("cpu", use_ema=True)

    def save(batch: int, logs: Any) -> None:
        if trainer.epoch == 1 and batch == 3:
            trainer.save(tmp_path / "state")

    fit(trainer, rows(), validation_data=rows(), callbacks=[LambdaCallback(on_test_batch_end=save)])
    again = trainer_on("cpu", use_ema=True)
    losses, history = fit(again, rows(), seed=8, validation_data=rows(), resume_from=tmp_path / "state")
    assert losses == expected[14:]
    assert history.history == unbroken.history


def test_with_a_part_of_the_data_as_an_epoch(tmp_path: Path) -> None:
    """The passes over the data do not begin with the epochs."""
    compare_with_unbroken(tmp_path, [4, 5], partial(trainer_on, "cpu"), arguments=lambda: {"steps_per_epoch": 5})


@pytest.mark.parametrize("stops", [[4], [4, 4, 4], [1, 3, 2]])
@pytest.mark.parametrize("arguments", [{"limit_train_batches": 4}, {"max_steps": 12, "steps_per_epoch": 4}])
def test_stopped_at_an_end_that_the_data_does_not_know(
    arguments: dict[str, Any], stops: list[int], tmp_path: Path
) -> None:
    compare_with_unbroken(tmp_path, stops, partial(trainer_on, "cpu"), arguments=lambda: arguments)


def test_with_arrays(tmp_path: Path) -> None:
    inputs = Augmented().inputs
    targets = inputs[:, :3].argmax(1)
    compare_with_unbroken(
        tmp_path, [9], partial(trainer_on, "cpu"), lambda: inputs, lambda: {"y": targets, "batch_size": 8}
    )


@pytest.mark.parametrize("during", ["on_test_batch_end", "on_test_end", "on_epoch_end", "on_epoch_begin"])
def test_stopped_outside_of_the_training_batches(during: str, tmp_path: Path) -> None:
    expected, unbroken = fit(trainer_on("cpu"), rows(), validation_data=rows())

    def stop(*arguments: Any) -> None:
        if trainer.epoch == (2 if during == "on_epoch_end" else 1):
            os.kill(os.getpid(), signal.SIGINT)

    trainer = trainer_on("cpu", output_dir=tmp_path)
    first, history = fit(trainer, rows(), validation_data=rows(), callbacks=[LambdaCallback(**{during: stop})])
    assert history.interrupted
    trainer = trainer_on("cpu", output_dir=tmp_path)
    second, history = fit(trainer, rows(), seed=8, validation_data=rows(), resume_from="last")
    assert first + second == expected
    assert history.history == unbroken.history


def test_a_training_that_has_ended_is_not_repeated(tmp_path: Path) -> None:
    _, unbroken = fit(trainer_on("cpu", output_dir=tmp_path), rows())
    again = trainer_on("cpu", output_dir=tmp_path)
    written = (tmp_path / "checkpoints" / "step_00000021").stat().st_ino
    losses, history = fit(again, rows(), seed=8, resume_from="last")
    assert losses == []
    assert (tmp_path / "checkpoints" / "step_00000021").stat().st_ino == written
    assert again.epoch == EPOCHS
    assert history.history == unbroken.history


def test_an_interrupted_training_may_be_saved_later(tmp_path: Path) -> None:
    """By hand, after something else was done with the Trainer."""
    expected, unbroken = fit(trainer_on("cpu"), rows())
    trainer = trainer_on("cpu")
    first, _ = fit(trainer, rows(), 9)
    trainer.evaluate(rows(), verbose=0)
    torch.rand(3)
    trainer.save(tmp_path / "later")
    second, history = fit(trainer_on("cpu"), rows(), seed=8, resume_from=tmp_path / "later")
    assert first + second == expected
    assert history.history == unbroken.history


def test_a_place_is_forgotten_with_a_load(tmp_path: Path) -> None:
    trainer = trainer_on("cpu")
    trainer.save(tmp_path / "new")
    fit(trainer, rows(), 9)
    trainer.load(tmp_path / "new")
    trainer.save(tmp_path / "again")
    assert not read_manifest(tmp_path / "again")["in_epoch"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    expected, _ = fit(trainer_on("cpu", output_dir=tmp_path, save_freq=2), rows())
    folder = tmp_path / "checkpoints"
    newest, before = (folder / f"step_{step:08d}" for step in (21, 20))
    content = bytearray((newest / "state.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "state.safetensors").write_bytes(content)
    message = r"step_00000021.state.safetensors is damaged: .*SHA-256.*Going on with .*step_00000020, the newest whole"
    with pytest.warns(UserWarning, match=message):
        losses, _ = fit(trainer_on("cpu", output_dir=tmp_path), rows(), seed=8, resume_from="last")
    assert losses == expected[20:]
    (before / "state.json").unlink()
    with pytest.raises(CheckpointError, match="state.json is missing"):
        fit(trainer_on("cpu"), rows(), resume_from=before)


def test_last_needs_a_folder_and_begins_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'resume_from="last" needs Trainer\(output_dir=...\)'):
        fit(trainer_on("cpu"), rows(), resume_from="last")
    expected, _ = fit(trainer_on("cpu"), rows())
    assert fit(trainer_on("cpu", output_dir=tmp_path), rows(), resume_from="last")[0] == expected


def test_other_parts_than_before_are_warned_about(tmp_path: Path) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU, output_dir=tmp_path)
    trainer.fit(class_batches(), verbose=0, callbacks=[EarlyStopping("loss")])
    other = Trainer(classifier(), "sgd", strategy=ON_CPU, output_dir=tmp_path)
    with pytest.warns(UserWarning, match="no state for|states that nobody") as warned:
        other.fit(class_batches(), epochs=2, verbose=0, resume_from="last", callbacks=[ReduceLROnPlateau("loss")])
    messages = [str(warning.message) for warning in warned]
    assert any("no state for callback.ReduceLROnPlateau, which start anew" in message for message in messages)
    assert any("states that nobody takes: callback.EarlyStopping" in message for message in messages)


def test_which_checkpoints_stay(tmp_path: Path) -> None:
    def steps() -> list[int]:
        return sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())

    fit(trainer_on("cpu", output_dir=tmp_path, save_freq=5, max_to_keep=2), rows())
    assert steps() == [20, 21]
    fit(trainer_on("cpu", output_dir=tmp_path, save_freq=8, max_to_keep=1), rows())  # another training
    assert steps() == [20, 21]  # the last one has taken the place of 21, and 20 is not its own


def test_the_newest_with_finite_weights_stays(tmp_path: Path) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU, output_dir=tmp_path, save_freq=1, max_to_keep=1)

    def spoil(batch: int, logs: Any) -> None:
        if batch == 2:
            nn.init.constant_(trainer.model[0].weight, float("nan"))

    with pytest.warns(RuntimeWarning, match="the loss of epoch 0 is nan, .* The newest checkpoint"):
        trainer.fit(class_batches(), verbose=0, callbacks=[LambdaCallback(on_train_batch_begin=spoil)])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000002", "step_00000007"]
