"""`LearningRateMonitor`: the learning rate in the logs."""

from __future__ import annotations

from xlatrainer.callbacks.callback import Callback, LogValues
from xlatrainer.callbacks.learning_rate import put_learning_rate

__all__ = ["LearningRateMonitor"]


class LearningRateMonitor(Callback):
    """Puts "learning_rate" into the logs of each batch and each epoch, for the callbacks after it and the `History`.

    With several param groups the second one's is "learning_rate_1", with several optimizers that of "generator" is
    "learning_rate_generator". It reads nothing from the device.

    Example:
        >>> from xlatrainer.callbacks import CSVLogger
        >>> callbacks = [LearningRateMonitor(), CSVLogger("log.csv")]
    """

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        put_learning_rate(self.trainer, logs)

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        put_learning_rate(self.trainer, logs)
