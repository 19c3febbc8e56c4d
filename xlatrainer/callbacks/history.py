"""`History`: the values of every epoch, as `fit` returns them."""

from __future__ import annotations

from xlatrainer.callbacks.callback import Callback, LogValues

__all__ = ["History"]


class History(Callback):
    """Records the logs of each epoch; `fit` adds one by itself and returns it.

    Attributes:
        epoch: The epochs recorded, counted from 0.
        history: For each name ("loss", "accuracy", "val_loss", ...) its values, one a recorded epoch.

    Example:
        >>> History().history
        {}
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_train_begin(self, logs: LogValues) -> None:
        self.epoch = []
        self.history = {}

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
