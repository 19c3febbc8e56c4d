"""The loops of fit, evaluate and predict: the order of epochs, batches and hooks. What a step does is the stepper's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from xlatrainer.backend import counters
from xlatrainer.backend.garbage import older_objects_set_aside
from xlatrainer.callbacks.callback_list import CallbackList
from xlatrainer.data.epoch_iterator import EpochIterator, grouped
from xlatrainer.trainer.checkpoint import Saved
from xlatrainer.trainer.interruption import Interruption
from xlatrainer.trainer.logs import Logs
from xlatrainer.trainer.modes import evaluating, training
from xlatrainer.trainer.predictions import Predictions
from xlatrainer.trainer.progress import Progress

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["FitPlan", "evaluate_loop", "fit_loop", "predict_loop"]


@dataclass(frozen=True)
class FitPlan:
    """What a `fit` goes through.

    Attributes:
        batches, validation: Gone through once an epoch.
        initial_epoch, epochs: The first epoch, and the one after the last.
        validation_freq: Validate after every so many epochs, or after these (counted from 1).
        max_steps: End when the Trainer has made so many updates; None for no such end.
        resumed: The checkpoint to go on from; None to begin.
    """

    batches: EpochIterator
    validation: EpochIterator | None
    initial_epoch: int
    epochs: int
    validation_freq: int | Sequence[int] = 1
    max_steps: int | None = None
    resumed: Saved | None = None

    def __post_init__(self) -> None:
        freq = self.validation_freq
        if isinstance(freq, int) and freq < 1:
            raise ValueError(f"validation_freq must be a number of epochs, at least 1, or a list of epochs, got {freq}")
        if not isinstance(freq, int | Sequence) or isinstance(freq, str):
            raise TypeError(f"validation_freq must be an int or a list of epochs counted from 1, got {freq!r}")

    def validates_after(self, epoch: int) -> bool:
        """Whether there is a validation after this epoch, counted from 0."""
        if self.validation is None:
            return False
        if isinstance(self.validation_freq, int):
            return (epoch + 1) % self.validation_freq == 0
        return epoch + 1 in self.validation_freq


def fit_loop(trainer: Trainer, plan: FitPlan, hooks: CallbackList, interruption: Interruption) -> None:
    """Train; sets the Trainer's `epoch`, and `stop_training` back to False when it begins.

    A training that is resumed has its state set twice: before this, for callbacks that look at it when they begin, and
    here, once the hooks were called that had been called before it was saved.
    """
    trainer.stop_training = plan.max_steps is not None and trainer.step >= plan.max_steps
    progress = Progress(plan.batches, plan.validation, trainer.stepper, trainer.strategy)
    trainer.saver.begin_fit(progress, plan.resumed, hooks)
    logs = Logs({}, trainer.strategy)
    resumed = plan.resumed
    if resumed is None:
        trainer.stepper.finish_group()  # which an interrupted training has left
    hooks.call("on_train_begin")
    if resumed is not None and not resumed.in_epoch:
        trainer.saver.resume(resumed, progress)
    with trainer.strategy.loop(), training(trainer.model), _collector_at_ease():
        for epoch in range(plan.initial_epoch, plan.epochs):
            is_left = resumed is not None and resumed.in_epoch  # to be ended, if nothing else
            if (trainer.stop_training and not is_left) or interruption.asked or not plan.batches.begin_epoch(epoch):
                break
            hooks.call("on_epoch_begin", epoch)
            progress.begin_epoch()
            trainer.stepper.begin("train")
            if resumed is not None and resumed.in_epoch:
                trainer.saver.resume(resumed, progress)
            resumed = None
            logs = _train_epoch(trainer, plan, hooks, interruption) if progress.trained is None else progress.trained
            if not interruption.asked and _begins_validation(plan, epoch):
                assert plan.validation is not None
                progress.begin_validation(logs)
                logs = logs.with_validation(evaluate_loop(trainer, plan.validation, hooks, interruption))
            if interruption.asked:
                break
            if trainer.schedules.schedulers:
                logs["learning_rate"] = trainer.learning_rate
                trainer.schedules.after_epoch(logs, plan.validation is not None)
            progress.end_epoch()
            trainer.epoch = epoch + 1
            hooks.call("on_epoch_end", epoch, logs=logs)
            trainer.saver.after_epoch(epoch, logs)
            trainer.stop_training = interruption.settle(trainer.stop_training, now=True) and not interruption.asked
    trainer.saver.end_fit(interruption)
    plan.batches.close()
    hooks.call("on_train_end", logs=logs)


def _collector_at_ease() -> contextlib.AbstractContextManager[None]:
    """While a process trains for the first time, its garbage is not what came before, but its compilation makes much.

    A later training leaves the collector alone: a model that was trained before may be garbage, and large.
    """
    return contextlib.nullcontext() if counters.value("Execute") else older_objects_set_aside()


def _begins_validation(plan: FitPlan, epoch: int) -> bool:
    """Whether there is a validation after this epoch, and batches for it."""
    return plan.validation is not None and plan.validates_after(epoch) and plan.validation.begin_epoch(epoch)


def _train_epoch(trainer: Trainer, plan: FitPlan, hooks: CallbackList, interruption: Interruption) -> Logs:
    progress = trainer.saver.progress
    assert progress is not None
    logs = None
    progress.drawing = True
    left = None if plan.max_steps is None else trainer.stepper.batches_until(plan.max_steps)
    for group in grouped(islice(plan.batches, left), trainer.steps_per_execution):
        progress.drawing = False
        hooks.call("on_train_batch_begin", group[0][0])
        logs = trainer.stepper.train([batch for _, batch in group])
        progress.done = group[-1][0] + 1
        trainer.strategy.run_closures()
        trainer.stop_training |= plan.max_steps is not None and trainer.step >= plan.max_steps
        hooks.call("on_train_batch_end", group[-1][0], logs=logs)
        trainer.saver.after_batch()
        if interruption.settle(trainer.stop_training):
            break
        progress.drawing = True
    progress.drawing = False
    if logs is None:  # a checkpoint was saved after the last batch
        logs = trainer.stepper.values()
    if not interruption.asked:
        trainer.stepper.finish_group()
    return logs


def evaluate_loop(
    trainer: Trainer, batches: EpochIterator, hooks: CallbackList, interruption: Interruption | None = None
) -> Logs:
    """Loss and metrics over `batches`, in eval mode; over those before an interruption, if one comes."""
    trainer.stepper.begin("test")
    logs = Logs({}, trainer.strategy)
    hooks.call("on_test_begin")
    with trainer.strategy.loop(), evaluating(trainer.model), torch.no_grad():
        for index, batch in batches:
            hooks.call("on_test_batch_begin", index)
            logs = trainer.stepper.test(batch)
            trainer.strategy.run_closures()
            hooks.call("on_test_batch_end", index, logs=logs)
            if interruption is not None and interruption.asked:
                break
    hooks.call("on_test_end", logs=logs)
    return logs


def predict_loop(trainer: Trainer, batches: EpochIterator, hooks: CallbackList) -> Any:
    """The predictions for `batches` on the CPU, concatenated."""
    predictions = Predictions(trainer.strategy)
    trainer.stepper.begin("predict")
    hooks.call("on_predict_begin")
    with trainer.strategy.loop(), evaluating(trainer.model), torch.no_grad():
        for index, batch in batches:
            hooks.call("on_predict_batch_begin", index)
            predictions.add(*trainer.stepper.predict(batch))
            trainer.strategy.run_closures()
            hooks.call("on_predict_batch_end", index)
    hooks.call("on_predict_end")
    return predictions.concatenated()
