"""`EMA`: averages of the weights, asked for by a callback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xlatrainer.callbacks.callback import Callback, LogValues

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["EMA"]


class EMA(Callback):
    """Keeps exponential moving averages of the weights, with which the validation, `evaluate` and `predict` work.

    What `Trainer(use_ema=True)` does, for a `fit` that is given the callback; the averages are brought on by the
    program of the update, are a part of the checkpoints, and stay in the Trainer afterwards as `trainer.ema`.

    Args:
        momentum: How much of an average an update keeps; default 0.99.
        copy_at_end: Whether the model's own parameters become their averages when the training ends, as in Keras;
            default True. With `EarlyStopping(restore_best_weights=True)` before this callback they become the averages
            of the best epoch.

    Example:
        >>> EMA(momentum=0.999).momentum
        0.999
    """

    def __init__(self, momentum: float = 0.99, copy_at_end: bool = True) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
        self.momentum = momentum
        self.copy_at_end = copy_at_end

    def set_trainer(self, trainer: Trainer) -> None:
        super().set_trainer(trainer)
        trainer.average_weights(self.momentum)

    def on_train_end(self, logs: LogValues) -> None:
        if self.copy_at_end and self.trainer.ema is not None:
            self.trainer.ema.copy_to_model()
            self.trainer.strategy.end_step()
