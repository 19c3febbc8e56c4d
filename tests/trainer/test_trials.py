"""Short runs that find mistakes before a long one does, and what ends a training early."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.helpers import DEVICES, ON_CPU, class_batches, classifier, strategy_on
from xlatrainer.callbacks.csv_logger import CSVLogger
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.model_checkpoint import ModelCheckpoint
from xlatrainer.trainer.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.1)
X, Y = (torch.cat(column) for column in zip(*class_batches(), strict=True))


def trainer_of(model: nn.Module | None = None, **arguments: Any) -> Trainer:
    return Trainer(classifier() if model is None else model, SGD, **{"strategy": ON_CPU, **arguments})


class Counting:
    """Notes which phases had how many batches."""

    def __init__(self) -> None:
        self.train = self.test = self.epochs = 0
        self.callback = LambdaCallback(
            on_train_batch_end=lambda batch, logs: self.add("train"),
            on_test_batch_end=lambda batch, logs: self.add("test"),
            on_epoch_end=lambda epoch, logs: self.add("epochs"),
        )

    def add(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.train, self.test, self.epochs


@pytest.mark.parametrize(("number", "batches"), [(True, 1), (3, 3)])
def test_a_dev_run_writes_nothing_and_says_what_it_saw(
    number: int, batches: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Counting()
    writing = [CSVLogger(tmp_path / "log.csv")]
    trainer = trainer_of(callbacks=writing, output_dir=tmp_path / "out")
    callbacks = [seen.callback, ModelCheckpoint(str(tmp_path / "model"))]
    history = trainer.fit(
        X, Y, 16, 50, 0, callbacks, validation_data=(X, Y), validation_freq=5, shuffle=False, fast_dev_run=number
    )
    assert seen.counts == (batches, batches, 1)
    assert list(tmp_path.iterdir()) == []
    assert (trainer.callbacks, history.epoch, trainer.step) == (writing, [0], batches)
    said = capsys.readouterr().out
    assert f"fast_dev_run: {batches} batch(es) of training and validation" in said
    assert "all values are finite" in said
    assert "all 5 parameters were changed by the updates" in said
    assert "the state was saved and loaded; nothing was kept" in said
    assert "left out, since they write: CSVLogger, ModelCheckpoint" in said
    trainer.fit(X, Y, 16, 2, 0, initial_epoch=1)
    assert (tmp_path / "out" / "checkpoints").exists()


def test_a_dev_run_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 3), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    trainer_of(Unused()).fit(X, Y, verbose=0, fast_dev_run=True)
    said = capsys.readouterr().out
    assert "NOT CHANGED by the updates: unused.weight, unused.bias" in said
    assert "there is no validation data" in said
    with pytest.warns(RuntimeWarning, match="the loss of epoch 0 is nan"):
        trainer_of(Unused()).fit(X * float("nan"), Y, verbose=0, fast_dev_run=True)
    assert "NOT FINITE: loss" in capsys.readouterr().out


def test_a_dev_run_counts_programs(capsys: pytest.CaptureFixture[str]) -> None:
    model = classifier(width=59)
    trainer_of(model, strategy=strategy_on("xla")).fit(X, Y, 16, verbose=0, validation_data=(X, Y), fast_dev_run=2)
    assert "programs compiled: 2" in capsys.readouterr().out


def test_wrong_dev_runs() -> None:
    with pytest.raises(ValueError, match="fast_dev_run must be True or a number of batches, at least 1, got -1"):
        trainer_of().fit(X, Y, fast_dev_run=-1)
    with pytest.raises(ValueError, match="leave resume_from out"):
        trainer_of().fit(X, Y, fast_dev_run=1, resume_from="last")


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        ({"limit_train_batches": 3}, (6, 14, 2)),
        ({"limit_train_batches": 0.5, "limit_val_batches": 1}, (6, 2, 2)),
        ({"limit_val_batches": 0}, (14, 0, 2)),
        ({"limit_val_batches": 0.3}, (14, 4, 2)),
        ({"overfit_batches": 2}, (4, 4, 2)),
        ({"overfit_batches": 0.5}, (6, 6, 2)),
    ],
)
@pytest.mark.parametrize("kind", ["rows", "loader", "list"])
def test_limits(limits: dict[str, Any], counts: tuple[int, int, int], kind: str) -> None:
    data: dict[str, tuple[Any, ...]] = {
        "rows": (X, Y, 16),
        "loader": (DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True),),
        "list": (class_batches(),),
    }
    seen = Counting()
    trainer_of().fit(
        *data[kind], epochs=2, validation_data=class_batches(), callbacks=[seen.callback], verbose=0, **limits
    )
    assert seen.counts == counts


@pytest.mark.parametrize("device", DEVICES)
def test_overfitting_the_same_batches(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    trainer = Trainer(model, "adam", learning_rate=0.03, strategy=strategy_on(device))
    history = trainer.fit(loader, epochs=40, verbose=2, overfit_batches=1).history
    assert history["loss"][-1] < 0.1 * history["loss"][0]
    said = capsys.readouterr().out
    assert "overfit_batches: 1 batches, loss" in said
    assert "in the last of 40: they are learned" in said
    frozen = Trainer(nn.Linear(8, 3), "sgd", learning_rate=0.0, strategy=ON_CPU)
    values = frozen.fit(loader, epochs=3, verbose=2, overfit_batches=2).history["loss"]
    assert values == [values[0]] * 3  # the same batches each time
    assert "they are not learned" in capsys.readouterr().out


def test_a_sanity_validation_changes_nothing() -> None:
    losses = []
    for steps in (0, 2):
        torch.manual_seed(0)
        seen = Counting()
        loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
        trainer = trainer_of(nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.2)), callbacks=[seen.callback])
        history = trainer.fit(loader, epochs=2, validation_data=loader, verbose=0, num_sanity_val_steps=steps)
        losses.append(history.history)
        assert seen.counts == (14, 14, 2)
    assert losses[0] == losses[1]


def test_a_sanity_validation_finds_mistakes_before_the_training() -> None:
    seen = Counting()
    with pytest.raises(ValueError, match="do not go together|none fits"):
        trainer_of(callbacks=[seen.callback]).fit(
            X, Y, validation_data=[(X, Y[:, None, None])], verbose=0, num_sanity_val_steps=1
        )
    assert seen.counts == (0, 0, 0)
    for validation, steps, came in ((None, 1, "none"), (iter(class_batches()), 1, "an iterator"), ((X, Y), -1, "-1")):
        with pytest.raises(ValueError, match=f"num_sanity_val_steps needs a number of .*got {came}"):
            trainer_of().fit(X, Y, validation_data=validation, num_sanity_val_steps=steps, verbose=0)


def test_a_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of()
    history = trainer.fit(X, Y, 16, 1000, 0, max_time=1e-9)
    assert (trainer.step, history.epoch) == (1, [0])
    assert "The time is up" in capsys.readouterr().out
    with pytest.raises(ValueError, match="'soon' is no length of time"):
        trainer.fit(X, Y, verbose=0, max_time="soon")


def test_the_limit_that_comes_first_ends_the_training() -> None:
    trainer = trainer_of()
    trainer.fit(X, Y, 16, 3, 0, max_steps=9, max_time="1 hour")
    assert (trainer.step, trainer.epoch) == (9, 2)
