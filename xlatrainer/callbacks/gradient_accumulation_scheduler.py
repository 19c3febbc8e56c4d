"""`GradientAccumulationScheduler`: more or fewer batches for one update as the epochs go by."""

from __future__ import annotations

from collections.abc import Mapping

from xlatrainer.callbacks.callback import Callback, LogValues

__all__ = ["GradientAccumulationScheduler"]


class GradientAccumulationScheduler(Callback):
    """Sets the Trainer's `gradient_accumulation_steps` at the beginning of epochs, and puts it back in the end.

    Args:
        scheduling: From which epoch on (counted from 0) how many batches make an update: `{0: 8, 4: 1}`. Before the
            first epoch that it names, the Trainer's own number holds.

    Raises:
        ValueError: If it is empty, or has an epoch below 0 or a number below 1.

    Example:
        >>> GradientAccumulationScheduler({0: 8, 4: 1}).steps_in(5)
        1
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling or min(scheduling) < 0 or min(scheduling.values()) < 1:
            raise ValueError(f"scheduling maps epochs, from 0, to numbers of batches, from 1; got {dict(scheduling)}")
        self.scheduling = dict(sorted(scheduling.items()))
        self._before: int | None = None

    def steps_in(self, epoch: int) -> int | None:
        """The batches for one update in this epoch; None before the first one that is named."""
        return next((steps for first, steps in reversed(self.scheduling.items()) if first <= epoch), None)

    def on_train_begin(self, logs: LogValues) -> None:
        if self._before is None:
            self._before = self.trainer.gradient_accumulation_steps

    def on_epoch_begin(self, epoch: int, logs: LogValues) -> None:
        steps = self.steps_in(epoch)
        if steps is not None and steps != self.trainer.gradient_accumulation_steps:
            self.trainer.gradient_accumulation_steps = steps

    def on_train_end(self, logs: LogValues) -> None:
        if self._before is None or self.trainer.stepper.accumulation.position:
            return  # interrupted within a group, which has its number until the training goes on
        if self.trainer.gradient_accumulation_steps != self._before:
            self.trainer.gradient_accumulation_steps = self._before
        self._before = None
