"""Short runs that find mistakes before a long one does: a few batches of everything, or the same few until learned."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xlatrainer.backend import counters
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.history import History
from xlatrainer.data.epoch_iterator import EpochIterator
from xlatrainer.data.random_states import random_states, restore_random_states
from xlatrainer.trainer.modes import evaluating
from xlatrainer.trainer.saver import Saver

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["dev_run", "overfit_verdict", "validate_first"]

_LEARNED = 0.1  # of the first loss: what is left when batches are learned by heart


def dev_run(trainer: Trainer, batches: int, arguments: dict[str, Any]) -> History:
    """`trainer.fit(**arguments)` with so many batches of each phase, one epoch and no files; prints what was seen.

    Callbacks that write files (`Callback.writes_files`) are left out, and no checkpoint is kept. The state is saved to
    a temporary folder and loaded again. The updates made stay made.

    Raises:
        ValueError: For a number below 1, or with `resume_from`.
    """
    if batches < 1:
        raise ValueError(f"fast_dev_run must be True or a number of batches, at least 1, got {batches}")
    if arguments["resume_from"] is not None:
        raise ValueError("fast_dev_run tries a training out from where the Trainer is; leave resume_from out")
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    before = trainer.strategy.fetch(list(parameters.values()))
    programs = counters.value("UncachedCompile")
    with _without_files(trainer, arguments["callbacks"]) as (callbacks, left_out):
        short = {
            "epochs": arguments["initial_epoch"] + 1,
            "callbacks": callbacks,
            "limit_train_batches": batches,
            "limit_val_batches": batches,
            "validation_freq": 1,
        }
        history: History = trainer.fit(**{**arguments, **short})
        programs = counters.value("UncachedCompile") - programs
        after = trainer.strategy.fetch(list(parameters.values()))
        _save_and_load(trainer)
    same = [name for name, old, new in zip(parameters, before, after, strict=True) if torch.equal(old, new)]
    print("\n".join(_report(history, batches, len(parameters), same, programs, left_out)), flush=True)
    return history


def overfit_verdict(history: History, number: int | None) -> str:
    """Whether the same few batches were learned, in a sentence."""
    losses = history.history["loss"]
    share = losses[-1] / losses[0] if losses[0] else 0.0
    learned = "they are learned" if share < _LEARNED else "they are not learned"
    return (
        f"overfit_batches: {number} batches, loss {losses[0]:.4g} in the first epoch, {losses[-1]:.4g} in the last of "
        f"{len(losses)}: {learned} (a loss below a tenth of the first is)"
    )


def validate_first(trainer: Trainer, validation: EpochIterator | None, steps: int) -> None:
    """Evaluate `steps` batches of the validation data, to find mistakes in it before the training.

    No hook is called, no value is kept, and no random state is changed.

    Raises:
        ValueError: If there is no validation data, if it cannot start anew, or for negative `steps`.
    """
    if steps == 0:
        return
    if steps < 0 or validation is None or validation.is_one_shot:
        came = "none" if validation is None else "an iterator, which cannot start anew" if steps > 0 else steps
        raise ValueError(
            f"num_sanity_val_steps needs a number of batches and validation data that can be iterated again; got {came}"
        )
    states = random_states()
    trainer.stepper.begin("test")
    with trainer.strategy.loop(), evaluating(trainer.model), torch.no_grad():
        for index, batch in validation:
            trainer.stepper.test(batch)
            if index + 1 == steps:
                break
    validation.close()
    restore_random_states(states)


@contextlib.contextmanager
def _without_files(trainer: Trainer, callbacks: Sequence[Callback]) -> Iterator[tuple[list[Callback], list[str]]]:
    """The callbacks of a call that write nothing, and the names of those left out, also of the Trainer's own."""
    own, saver = trainer.callbacks, trainer.saver
    trainer.callbacks = [callback for callback in own if not callback.writes_files]
    trainer.saver = Saver(trainer, None, "epoch", None, False)
    left_out = [type(callback).__name__ for callback in [*own, *callbacks] if callback.writes_files]
    try:
        yield [callback for callback in callbacks if not callback.writes_files], left_out
    finally:
        trainer.callbacks, trainer.saver = own, saver


def _save_and_load(trainer: Trainer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder) / "state")
        trainer.load(Path(folder) / "state")


def _report(
    history: History, batches: int, parameters: int, same: list[str], programs: int, left_out: list[str]
) -> Iterator[str]:
    values = {name: series[-1] for name, series in history.history.items()}
    phases = "training and validation" if "val_loss" in values else "training; there is no validation data"
    yield f"fast_dev_run: {batches} batch(es) of {phases}"
    yield "  values: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    odd = [name for name, value in values.items() if not math.isfinite(value)]
    yield f"  NOT FINITE: {', '.join(odd)}" if odd else "  all values are finite"
    if same:
        yield f"  NOT CHANGED by the updates: {', '.join(same[:5])}{', ...' if len(same) > 5 else ''}"
    else:
        yield f"  all {parameters} parameters were changed by the updates"
    yield f"  programs compiled: {programs}"
    yield "  the state was saved and loaded; nothing was kept"
    if left_out:
        yield f"  left out, since they write: {', '.join(left_out)}"
