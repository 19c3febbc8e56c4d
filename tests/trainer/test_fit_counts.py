"""How many programs `fit` compiles and runs, and what it copies: exact counts on the `xla` device.

An unread value costs nothing, a changed learning rate compiles nothing, a short batch is one program more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

from tests.trainer.helpers import class_batches, classifier
from xlatrainer.backend import counters
from xlatrainer.backend.replay.optimizer_state import initialize_state
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.trainer.trainer import Trainer

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": "adamw",
    "rmsprop": "rmsprop",
}
STEPS = 6  # of 16 rows
WIDTHS = count(17)  # a width for each model: what other tests have compiled is not found in the cache
STATES = 4  # sum and weight, of the loss and of one metric


class Counted:
    """The counts within a `with` block, by counter."""

    def __init__(self) -> None:
        self._before = counters.snapshot()

    def __getitem__(self, name: str) -> int:
        return counters.value(name) - self._before.get(name, 0)

    @property
    def fallbacks(self) -> list[str]:
        return [name for name in counters.snapshot() if name.startswith("aten::") and self[name]]


@contextmanager
def counted() -> Iterator[Counted]:
    yield Counted()


def trainer_with(optimizer: Any = OPTIMIZERS["sgd"], **arguments: Any) -> Trainer:
    return Trainer(classifier(width=next(WIDTHS)), optimizer, metrics=["accuracy"], **arguments)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_execution_a_step_and_one_program(name: str) -> None:
    trainer = trainer_with(OPTIMIZERS[name])
    batches = class_batches(rows=16 * STEPS)
    initialize_state(trainer.optimizer)  # which `fit` does: here, so that its copies are not counted
    with counted() as first:
        trainer.fit(batches, verbose=0)
    assert first.fallbacks == []
    assert first["Execute"] == STEPS
    assert first["UncachedCompile"] == 1
    assert first["CachedCompile"] == 1
    assert first["Replay"] == STEPS - 2
    assert first["TransferToDevice"] == 2 * STEPS + STATES
    assert first["TransferFromDevice"] == 2  # the History reads loss and accuracy, at the end of the epoch
    with counted() as again:
        trainer.fit(batches, epochs=3, verbose=0)
    assert again["Execute"] == 3 * STEPS
    assert again["Replay"] == 3 * STEPS
    assert again["UncachedCompile"] == 0
    assert again["TransferToDevice"] == 3 * (2 * STEPS + STATES)
    assert again["TransferFromDevice"] == 3 * 2


def test_a_short_last_batch_is_one_program_for_all_epochs() -> None:
    trainer = trainer_with()
    with counted() as first:
        trainer.fit(class_batches(rows=16 * STEPS + 5), verbose=0)
    assert first["UncachedCompile"] == 2
    assert first["Execute"] == STEPS + 1
    with counted() as again:
        trainer.fit(class_batches(rows=16 * STEPS + 5), epochs=4, verbose=0)
    assert again["UncachedCompile"] == 0


def test_validation_adds_its_own_programs_only() -> None:
    trainer = trainer_with()
    held_out = class_batches(rows=40, seed=5)  # 16, 16 and 8 rows
    with counted() as counts:
        trainer.fit(class_batches(rows=16 * STEPS), epochs=3, validation_data=held_out, verbose=0)
    assert counts["UncachedCompile"] == 1 + 2
    assert counts["Execute"] == 3 * (STEPS + 3)
    assert counts["TransferFromDevice"] == 3 * 4


def test_a_changing_learning_rate_compiles_nothing() -> None:
    trainer = trainer_with()
    trainer.fit(class_batches(rows=16 * STEPS), verbose=0)

    def change(batch: int, logs: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.01 + 0.001 * batch
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.0

    with counted() as counts:
        trainer.fit(class_batches(rows=16 * STEPS), callbacks=[LambdaCallback(on_train_batch_begin=change)], verbose=0)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == STEPS


def test_reading_a_value_runs_no_program() -> None:
    read: list[float] = []
    trainer = trainer_with()
    trainer.fit(class_batches(rows=16 * STEPS), verbose=0)
    with counted() as counts:
        trainer.fit(
            class_batches(rows=16 * STEPS),
            callbacks=[LambdaCallback(on_train_batch_end=lambda batch, logs: read.append(logs["loss"]))],
            verbose=0,
        )
    assert len(read) == STEPS
    assert counts["Execute"] == STEPS
    assert counts["UncachedCompile"] == 0
    assert counts["TransferFromDevice"] == 2 * STEPS  # all values of a batch together; the last ones are read once


def test_kept_logs_do_not_change_the_programs() -> None:
    kept: list[Any] = []

    class Keep(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            kept.append(logs)

    trainer = trainer_with()
    trainer.fit(class_batches(rows=16 * STEPS), verbose=0)
    with counted() as counts:
        trainer.fit(class_batches(rows=16 * STEPS), callbacks=[Keep()], verbose=0)
    assert counts["UncachedCompile"] == 0
    assert counts["Execute"] == STEPS
    losses = [logs["loss"] for logs in kept]
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("verbose", [1, 2])
def test_showing_progress_runs_nothing_more(verbose: int, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_with()
    trainer.fit(class_batches(rows=16 * STEPS), verbose=0)
    with counted() as counts:
        trainer.fit(class_batches(rows=16 * STEPS), epochs=2, verbose=verbose)
    assert counts["Execute"] == 2 * STEPS
    assert counts["UncachedCompile"] == 0
    assert "loss: 0." in capsys.readouterr().out


def test_evaluate_and_predict() -> None:
    trainer = trainer_with()
    batches = class_batches(rows=16 * STEPS)
    trainer.evaluate(batches, verbose=0)
    trainer.predict(batches, verbose=0)
    with counted() as counts:
        trainer.evaluate(batches, verbose=0)
    assert (counts["Execute"], counts["UncachedCompile"]) == (STEPS, 0)
    with counted() as counts:
        trainer.predict(batches, verbose=0)
    assert (counts["Execute"], counts["UncachedCompile"]) == (STEPS, 0)
    assert counts["TransferToDevice"] == STEPS  # targets stay on the host
    assert counts["TransferFromDevice"] == STEPS


def test_loading_a_checkpoint_compiles_no_step_again(tmp_path: Any) -> None:
    trainer = trainer_with()
    batches = class_batches(rows=16 * STEPS)
    trainer.fit(batches, verbose=0)
    trainer.save(tmp_path / "state.pt")
    trainer.load(tmp_path / "state.pt")
    with counted() as counts:
        trainer.fit(batches, verbose=0)
    assert (counts["Execute"], counts["UncachedCompile"]) == (STEPS, 0)


@pytest.mark.parametrize(
    ("metrics", "loss"),
    [
        (["accuracy", "f1", "precision", "recall", "perplexity"], None),
        (["auc", "binary_accuracy", "f1"], "bce_with_logits"),
        (["r2", "rmse", "mae", "mse"], "mse"),
    ],
)
def test_metrics_are_a_part_of_the_step(metrics: list[str], loss: str | None) -> None:
    """None reads a value, has a program of its own, or keeps the step from being replayed; weighted or not."""
    width = next(WIDTHS)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 3 if loss is None else 1))
    batches = [(x, y if loss is None else (y > 0).float()[:, None], y + 1.0) for x, y in class_batches(rows=16 * STEPS)]
    trainer = Trainer(model, "sgd", loss, metrics, weighted_metrics=metrics)
    trainer.fit(batches, verbose=0)
    with counted() as counts:
        trainer.fit(batches, epochs=2, verbose=0)
    assert counts.fallbacks == []
    assert (counts["Execute"], counts["Replay"], counts["UncachedCompile"]) == (2 * STEPS, 2 * STEPS, 0)
    assert counts["TransferFromDevice"] == 2 * (1 + 2 * len(metrics))
    with counted() as first:
        trainer.evaluate(batches, verbose=0)
    assert (first["Execute"], first["UncachedCompile"]) == (STEPS, 1)
