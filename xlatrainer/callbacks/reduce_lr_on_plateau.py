"""`ReduceLROnPlateau`: a smaller learning rate when a value gets no better."""

from __future__ import annotations

from typing import Any

from xlatrainer.callbacks.callback import LogValues
from xlatrainer.callbacks.learning_rate import learning_rates, put_learning_rate, set_learning_rate
from xlatrainer.callbacks.monitor import Mode, Monitor
from xlatrainer.callbacks.per_fit import PerFitCallback

__all__ = ["ReduceLROnPlateau"]


class ReduceLROnPlateau(PerFitCallback):
    """Multiplies the learning rate of every param group by `factor` after `patience` epochs without a better value.

    The logs of each epoch get the "learning_rate" that it was trained with. A new learning rate compiles nothing.

    Args:
        monitor: The name to watch; default "val_loss". A name that is not there is dealt with as in `EarlyStopping`.
        factor: Between 0 and 1; default 0.1.
        patience: Epochs without a better value to bear; default 10.
        verbose: 1 prints each change; default 0.
        mode: "min", "max" or "auto" (default), which tells by the name.
        min_delta: By how much a value must be better to count; default 0.0001.
        cooldown: Epochs after a change in which nothing is counted; default 0.
        min_lr: No learning rate is made smaller than this; default 0.

    Attributes:
        best: The best value so far; `wait`: epochs since then; `cooldown_counter`: epochs of a cooldown still to come.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"factor must be between 0 and 1, got {factor}")
        self.monitor = Monitor(monitor, mode, min_delta, "ReduceLROnPlateau")
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self.reset()

    def reset(self) -> None:
        self.best = self.monitor.worst
        self.wait = 0
        self.cooldown_counter = 0

    def on_train_begin(self, logs: LogValues) -> None:
        super().on_train_begin(logs)
        self.monitor.begin()

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        put_learning_rate(self.trainer, logs)
        value = self.monitor.read(logs)
        if value is None:
            return
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.monitor.is_better(value, than=self.best):
            self.best = value
            self.wait = 0
        elif not self.cooldown_counter:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def on_train_end(self, logs: LogValues) -> None:
        super().on_train_end(logs)
        self.monitor.end()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("best", "wait", "cooldown_counter")}

    def _reduce(self, epoch: int) -> None:
        before = learning_rates(self.trainer)
        after = [max(lr * self.factor, min(lr, self.min_lr)) for lr in before]
        if after == before:
            return
        set_learning_rate(self.trainer, after)
        self.cooldown_counter = self.cooldown
        self.wait = 0
        if self.verbose:
            print(f"Epoch {epoch + 1}: learning rate {before[0]:.4g} -> {after[0]:.4g}")
