"""`LearningRateScheduler`: a learning rate for each epoch, from a function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

from xlatrainer.callbacks.callback import Callback, LogValues
from xlatrainer.callbacks.learning_rate import learning_rates, put_learning_rate, set_learning_rate

__all__ = ["LearningRateScheduler"]


class LearningRateScheduler(Callback):
    """Sets the learning rate of every param group at the beginning of each epoch; the logs get "learning_rate".

    A new learning rate compiles nothing. Schedules by step are `torch.optim.lr_scheduler`s, which the Trainer takes.

    Args:
        schedule: `(epoch, lr) -> lr`, with the epoch counted from 0 and the group's current learning rate; or
            `(epoch) -> lr`.
        verbose: 1 prints the learning rate of each epoch; default 0.

    Example:
        >>> halving = LearningRateScheduler(lambda epoch, lr: lr / 2 if epoch else lr)
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        if not callable(schedule):
            raise TypeError(f"schedule must be a function (epoch, lr) -> lr, got {schedule!r}")
        self.schedule = schedule
        self.verbose = verbose
        self._takes_lr = _takes_two(schedule)

    def on_epoch_begin(self, epoch: int, logs: LogValues) -> None:
        rates = [
            self.schedule(epoch, lr) if self._takes_lr else self.schedule(epoch) for lr in learning_rates(self.trainer)
        ]
        for rate in rates:
            if not isinstance(rate, int | float) or not math.isfinite(rate):
                raise ValueError(f"the schedule must return a finite number, got {rate!r} for epoch {epoch}")
        set_learning_rate(self.trainer, [float(rate) for rate in rates])
        if self.verbose:
            print(f"Epoch {epoch + 1}: learning rate {rates[0]:.4g}")

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        put_learning_rate(self.trainer, logs)


def _takes_two(function: Callable[..., float]) -> bool:
    """Whether the function can be called as (epoch, lr)."""
    try:
        inspect.signature(function).bind(0, 0.1)
    except TypeError:
        return False
    return True
