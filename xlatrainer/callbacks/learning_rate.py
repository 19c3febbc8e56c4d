"""The learning rates of a Trainer, as the callbacks read and set them: one a param group of every optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from xlatrainer.callbacks.callback import LogValues

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["learning_rates", "put_learning_rate", "set_learning_rate"]


def learning_rates(trainer: Trainer) -> list[float]:
    """The current learning rate of each param group."""
    return [float(group["lr"]) for _, group in _groups(trainer)]


def set_learning_rate(trainer: Trainer, values: Sequence[float]) -> None:
    """Set the learning rate of each param group; it compiles nothing."""
    for (_, group), value in zip(_groups(trainer), values, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def put_learning_rate(trainer: Trainer, logs: LogValues) -> None:
    """Add the learning rates to the logs.

    The first one is "learning_rate", that of the second param group "learning_rate_1", of an optimizer with a name
    "learning_rate_generator".
    """
    for name, group in _groups(trainer):
        # a tensor stays on the device until somebody reads the logs
        logs[name] = group["lr"] if isinstance(group["lr"], Tensor) else float(group["lr"])  # type: ignore[assignment]


def _groups(trainer: Trainer) -> Iterator[tuple[str, dict[str, Any]]]:
    several = len(trainer.optimizers) > 1
    for name, optimizer in trainer.optimizers.items():
        stem = f"learning_rate_{name}" if several else "learning_rate"
        for index, group in enumerate(optimizer.param_groups):
            yield f"{stem}_{index}" if index else stem, group
