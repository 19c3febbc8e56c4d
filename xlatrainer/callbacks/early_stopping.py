"""`EarlyStopping`: end the training when a value gets no better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from xlatrainer.callbacks.callback import LogValues
from xlatrainer.callbacks.monitor import Mode, Monitor
from xlatrainer.callbacks.per_fit import PerFitCallback
from xlatrainer.callbacks.weights import copy_weights, put_weights

__all__ = ["EarlyStopping"]


class EarlyStopping(PerFitCallback):
    """Stops after `patience` epochs in a row without a better value; arguments and rules are Keras's.

    Args:
        monitor: The name to watch; default "val_loss". If it is not in the logs of the first epoch, a warning says
            which names are; if it never is, an error.
        min_delta: By how much a value must be better to count, in the units of the value; default 0.
        patience: Epochs without a better value to bear; default 0.
        verbose: 1 prints when it stops and what it restores; default 0.
        mode: "min", "max" or "auto" (default), which tells by the name.
        baseline: Values that are not better than this one do not count either; default None.
        restore_best_weights: True keeps a copy of the best epoch's parameters, buffers and averages of weights on the
            device and puts them back when the training ends, whatever ends it. Default False.
        start_from_epoch: Epochs (counted from 0) before this one do not count; default 0.
        stopping_threshold: Stop as soon as the value is better than this; default None.
        divergence_threshold: Stop as soon as the value is worse than this, or NaN; default None.

    Attributes:
        best, best_epoch: The best value and its epoch, counted from 0.
        wait: Epochs since then.
        stopped_epoch: The epoch after which it stopped; None if it did not. `reason`: why.

    Example:
        >>> stopping = EarlyStopping("val_accuracy", patience=3, restore_best_weights=True)
        >>> stopping.monitor.higher_is_better
        True
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
        *,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
    ) -> None:
        if patience < 0:
            raise ValueError(f"patience is a number of epochs, at least 0; got {patience}")
        self.monitor = Monitor(monitor, mode, min_delta, "EarlyStopping")
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.reset()

    def reset(self) -> None:
        self.best = self.monitor.worst
        self.best_epoch: int | None = None
        self.best_weights: dict[str, Tensor] | None = None
        self.wait = 0
        self.stopped_epoch: int | None = None
        self.reason = ""

    def on_train_begin(self, logs: LogValues) -> None:
        super().on_train_begin(logs)
        self.monitor.begin()

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        value = self.monitor.read(logs)
        if value is None or epoch < self.start_from_epoch:
            return
        self.wait += 1
        is_better = self.monitor.is_better(value, than=self.best)
        if is_better or self.best_epoch is None:
            self.best_epoch = epoch
            if self.restore_best_weights:
                self.best_weights = copy_weights(self.trainer)
                self.trainer.strategy.end_step()
        if is_better:
            self.best = value
            if self.baseline is None or self.monitor.is_better(value, than=self.baseline):
                self.wait = 0
        self.reason = self._reason_to_stop(value, epoch)
        if self.reason:
            self.stopped_epoch = epoch
            self.trainer.stop_training = True

    def _reason_to_stop(self, value: float, epoch: int) -> str:
        name, better = self.monitor.name, self.monitor.higher_is_better
        goal, bound = self.stopping_threshold, self.divergence_threshold
        if goal is not None and (value > goal if better else value < goal):
            return f"{name} is {value:.6g}, better than {goal:.6g}"
        if bound is not None and not (value >= bound if better else value <= bound):
            return f"{name} is {value:.6g}, worse than {bound:.6g}"
        if self.wait >= self.patience and self.wait and epoch > 0:
            return f"{name} has not become better than {self.best:.6g}"
        return ""

    def on_train_end(self, logs: LogValues) -> None:
        super().on_train_end(logs)
        if self.verbose and self.stopped_epoch is not None:
            print(f"Epoch {self.stopped_epoch + 1}: stopped, {self.reason}")
        if self.best_weights is not None:
            put_weights(self.trainer, self.best_weights)
            self.trainer.strategy.end_step()
            self.best_weights = None
            if self.verbose:
                print(f"The weights of epoch {(self.best_epoch or 0) + 1} are back")
        self.monitor.end()

    def state_dict(self) -> dict[str, Any]:
        names = ("best", "best_epoch", "best_weights", "wait", "stopped_epoch", "reason")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.best_weights is not None:
            device = self.trainer.strategy.device
            self.best_weights = {name: tensor.to(device) for name, tensor in self.best_weights.items()}
