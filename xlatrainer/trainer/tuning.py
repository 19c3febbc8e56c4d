"""Settings found by trial: a learning rate, a batch size. The Trainer is afterwards what it was before."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from xlatrainer.data.random_states import random_states, restore_random_states
from xlatrainer.nested import map_tensors
from xlatrainer.optional import require
from xlatrainer.trainer.checkpoint import as_saved, collect, load_state
from xlatrainer.trainer.inputs import batches_to_train
from xlatrainer.trainer.logs import Logs
from xlatrainer.trainer.steps import rows_of

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["LearningRates", "find_batch_size", "find_lr"]

_READ_EVERY = 10  # updates whose losses are fetched together
_SMALL, _LARGER = 16, 64  # rows of the two batches whose memory is measured


@dataclass(frozen=True)
class LearningRates:
    """What `Trainer.find_lr` found.

    Attributes:
        rates: The learning rates that were tried, rising.
        losses: The loss of the batch that was trained on with each.
        suggestion: The rate at which the smoothed loss falls most steeply; None if it nowhere falls.
    """

    rates: list[float]
    losses: list[float]
    suggestion: float | None

    def plot(self) -> Any:
        """Draw the losses over the rates.

        Returns:
            The `matplotlib` figure.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        pyplot = require("matplotlib.pyplot", "LearningRates.plot", 'pip install "xlatrainer[plot]"')
        figure, axis = pyplot.subplots(layout="tight")
        axis.plot(self.rates, self.losses, alpha=0.4, label="loss")
        axis.plot(self.rates, _smoothed(self.losses), label="smoothed")
        if self.suggestion is not None:
            axis.axvline(self.suggestion, linestyle="--", label=f"suggestion: {self.suggestion:.2g}")
        axis.set_xscale("log")
        axis.set_xlabel("learning rate")
        axis.legend()
        return figure


def find_lr(
    trainer: Trainer,
    x: Any,
    y: Any,
    *,
    batch_size: int | None,
    min_lr: float,
    max_lr: float,
    steps: int,
    early_stop_threshold: float | None,
) -> LearningRates:
    """See `Trainer.find_lr`."""
    if not 0 < min_lr < max_lr or steps < 3:
        raise ValueError(
            f"min_lr must be above 0 and below max_lr, and steps at least 3; got {min_lr}, {max_lr} and {steps}"
        )
    rates = [min_lr * (max_lr / min_lr) ** (step / (steps - 1)) for step in range(steps)]
    losses: list[float] = []
    waiting: list[Logs] = []
    with _as_it_was(trainer):
        groups = [group for optimizer in trainer.optimizers.values() for group in optimizer.param_groups]
        shares = [float(group["lr"]) / float(groups[0]["lr"]) if float(groups[0]["lr"]) else 1.0 for group in groups]
        batches = _endless(trainer, x, y, batch_size)
        for rate in rates:
            for group, share in zip(groups, shares, strict=True):
                group["lr"] = rate * share
            trainer.gradient_accumulation_steps = 1
            waiting.append(trainer.train_on_batch(next(batches)))
            if len(waiting) == _READ_EVERY or rate == rates[-1]:
                losses += [_loss_of(logs) for logs in waiting]
                waiting = []
                best = min((loss for loss in losses if math.isfinite(loss)), default=math.inf)
                diverged = early_stop_threshold is not None and losses[-1] > early_stop_threshold * best
                if diverged or not math.isfinite(losses[-1]):
                    break
    kept = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    tried = rates[:kept]
    return LearningRates(tried, losses[:kept], _steepest(tried, losses[:kept]))


def find_batch_size(trainer: Trainer, x: Any, y: Any, *, memory: int | None, max_batch_size: int, margin: float) -> int:
    """See `Trainer.find_batch_size`."""
    if max_batch_size < 1 or not 0 <= margin < 1:
        raise ValueError(
            f"max_batch_size must be at least 1 and margin at least 0 and below 1, got {max_batch_size} and {margin}"
        )
    available = trainer.strategy.memory_limit() if memory is None else memory
    with _as_it_was(trainer):
        sample = next(_endless(trainer, x, y, None))
        if available is None:
            return _largest_that_runs(trainer, sample, max_batch_size)
        limit = available * (1 - margin)
        small, larger = min(_SMALL, max_batch_size), min(_LARGER, max_batch_size)
        needed = {rows: _memory_of(trainer, sample, rows) for rows in {small, larger}}
        if needed[small] is None:
            return _largest_that_runs(trainer, sample, max_batch_size)
        each = max((needed[larger] - needed[small]) / max(larger - small, 1), 1.0)  # type: ignore[operator]
        fits = (limit - needed[small]) / each + small  # type: ignore[operator]
        rows = _power_of_two(min(fits, max_batch_size))
        while rows >= 1:
            found = needed[rows] if rows in needed else _memory_of(trainer, sample, rows)
            if found is not None and found <= limit:
                return rows
            rows //= 2
    raise ValueError(f"not even a batch of one row fits into {int(limit):,} bytes")


@contextlib.contextmanager
def _as_it_was(trainer: Trainer) -> Iterator[None]:
    """All state of the Trainer, and all random states, are afterwards what they were before."""
    content = collect(trainer, None, "")()
    before = random_states()
    stopping, accumulation = trainer.stop_training, trainer.gradient_accumulation_steps
    trainer.stepper.accumulation.position = 0  # of a group that is not whole, which is kept with its sums
    try:
        yield
    finally:
        for optimizer in trainer.optimizers.values():
            optimizer.state.clear()
        trainer.gradient_accumulation_steps = accumulation
        load_state(trainer, as_saved("the state before", content), everything=False)
        restore_random_states(before)
        trainer.stop_training = stopping


def _endless(trainer: Trainer, x: Any, y: Any, batch_size: int | None) -> Iterator[Any]:
    """The training batches, again and again."""
    batches, _ = batches_to_train(trainer.model, x, y, epochs=1, batch_size=batch_size)
    epoch = 0
    while batches.begin_epoch(epoch):
        for _, batch in batches:
            yield batch
        epoch += 1
    raise ValueError("the data has ended; pass data that can be gone through again, or more of it")


def _loss_of(logs: Logs) -> float:
    if "loss" not in logs:
        raise ValueError("find_lr needs a training_step that returns a loss")
    return logs["loss"]


def _smoothed(losses: list[float], keep: float = 0.9) -> list[float]:
    smooth, average = [], 0.0
    for number, loss in enumerate(losses, 1):
        average = keep * average + (1 - keep) * loss
        smooth.append(average / (1 - keep**number))
    return smooth


def _steepest(rates: list[float], losses: list[float]) -> float | None:
    if len(losses) < 3:
        return None
    slopes = np.gradient(np.array(_smoothed(losses)), np.log(np.array(rates)))
    index = int(slopes.argmin())
    return rates[index] if slopes[index] < 0 else None


def _of_rows(sample: Any, rows: int) -> Any:
    """A batch of so many rows, those of `sample` over and over."""
    present = rows_of(sample)
    index = torch.arange(rows) % present

    def take(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)] if tensor.dim() and tensor.shape[0] == present else tensor

    return map_tensors(take, sample)


def _memory_of(trainer: Trainer, sample: Any, rows: int) -> int | None:
    trainer.gradient_accumulation_steps = 1
    dict(trainer.train_on_batch(_of_rows(sample, rows)))  # read, so that an error comes here
    return trainer.stepper.memory_needed()


def _largest_that_runs(trainer: Trainer, sample: Any, max_batch_size: int) -> int:
    found, rows = 0, min(2, max_batch_size)  # a batch norm refuses a single row
    while rows <= max_batch_size:
        try:
            _memory_of(trainer, sample, rows)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error) or not found:
                raise
            return found
        found, rows = rows, rows * 2
    return found


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(
        sign in text for sign in ("out of memory", "resource_exhausted", "can't allocate")
    )


def _power_of_two(number: float) -> int:
    return 2 ** int(math.log2(number)) if number >= 1 else 1
