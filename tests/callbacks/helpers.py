"""Trainers to hang callbacks on, and callbacks that play a part."""

from collections.abc import Sequence
from typing import Any

from tests.trainer.helpers import class_batches, classifier, strategy_on
from xlatrainer.backend import counters
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.history import History
from xlatrainer.trainer.trainer import Trainer

COUNTED = ("Execute", "UncachedCompile", "TransferFromDevice", "Replay")


def small_trainer(device: str = "cpu", **arguments: Any) -> Trainer:
    return Trainer(classifier(), arguments.pop("optimizer", "sgd"), strategy=strategy_on(device), **arguments)


class Values(Callback):
    """Puts these values into the logs of the epochs, one after the other, under `name`."""

    def __init__(self, values: Sequence[float | None], name: str = "val_loss") -> None:
        self.values = values
        self.name = name

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        value = self.values[epoch]
        if value is not None:
            logs[self.name] = value


def fit_with(values: Sequence[float | None], *callbacks: Callback, name: str = "val_loss", **arguments: Any) -> History:
    """Train as many epochs as there are values of `name`; returns the history."""
    trainer = arguments.pop("trainer", None) or small_trainer()
    return trainer.fit(
        class_batches(rows=16),
        epochs=len(values),
        callbacks=[Values(values, name), *callbacks],
        verbose=0,
        **arguments,
    )


def counts() -> dict[str, int]:
    return {name: counters.value(name) for name in COUNTED}


def since(before: dict[str, int]) -> dict[str, int]:
    return {name: counters.value(name) - count for name, count in before.items()}
