"""What the data arguments of fit, evaluate and predict stand for: the batches to go through."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from xlatrainer.data.adapters import DEFAULT_BATCH_SIZE, as_batches, has_rows
from xlatrainer.data.batch import Arguments
from xlatrainer.data.class_weight import ClassWeight
from xlatrainer.data.epoch_iterator import EpochIterator
from xlatrainer.data.rows import RowBatches, is_rows
from xlatrainer.data.splitting import split_off

__all__ = ["Limits", "batches_to_evaluate", "batches_to_predict", "batches_to_train"]


@dataclass(frozen=True)
class Limits:
    """How much of the data a run goes through; None is all of it.

    Attributes:
        train, validation: At most so many batches of each epoch (an int), or such a part of them (a float in (0, 1]);
            a validation of 0 is none.
        overfit: Train on the same few batches, in one order, and validate on as many: a number or a part as above.
    """

    train: int | float | None = None
    validation: int | float | None = None
    overfit: int | float | None = None


def batches_to_train(
    model: nn.Module,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    epochs: int,
    batch_size: int | None = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    steps_per_epoch: int | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    validation_batch_size: int | None = None,
    validation_steps: int | None = None,
    limits: Limits | None = None,
) -> tuple[EpochIterator, EpochIterator | None]:
    """The batches of an epoch, and those of its validation; see `Trainer.fit`."""
    limits = Limits() if limits is None else limits
    arguments = Arguments.of(model)
    shuffle = shuffle and limits.overfit is None
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "argument": "x", "arguments": arguments}
    validation: Iterable[Any] | None = None
    if validation_split:
        if validation_data is not None:
            raise ValueError("pass validation_split or validation_data, not both")
        batches, validation = split_off(x, y, sample_weight, validation_split, validation_batch_size, **options)
    else:
        batches = as_batches(x, y, sample_weight, **options)
        if validation_data is not None:
            validation = _validation(validation_data, validation_batch_size, batch_size, arguments)
    limit = limits.train
    if limits.overfit is not None:
        batches, limit = _first_batches(batches, limits.overfit), None
    training = EpochIterator(
        batches,
        argument="x",
        epochs=epochs,
        steps=steps_per_epoch,
        limit=limit,
        prepare=None if class_weight is None else ClassWeight(class_weight),
    )
    limit = limits.validation if limits.overfit is None else limits.overfit
    if validation is None or limit == 0:
        return training, None
    return training, EpochIterator(
        validation,
        argument="validation_data",
        epochs=epochs,
        steps=validation_steps,
        steps_name="validation_steps",
        limit=limit,
        restarts=True,
    )


def batches_to_evaluate(
    model: nn.Module,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
) -> EpochIterator:
    """The batches of `Trainer.evaluate`."""
    batches = as_batches(x, y, sample_weight, batch_size=batch_size, argument="x", arguments=Arguments.of(model))
    return EpochIterator(batches, argument="x", steps=steps, steps_name="steps")


def batches_to_predict(
    model: nn.Module, x: Any, *, batch_size: int | None = None, steps: int | None = None
) -> EpochIterator:
    """The batches of `Trainer.predict`."""
    if isinstance(x, tuple) and is_rows(x):  # several inputs
        batches: Iterable[Any] = RowBatches((x,), DEFAULT_BATCH_SIZE if batch_size is None else batch_size)
    else:
        batches = as_batches(x, batch_size=batch_size, argument="x", arguments=Arguments.of(model))
    return EpochIterator(batches, argument="x", steps=steps, steps_name="steps")


def _validation(data: Any, batch_size: int | None, default: int | None, arguments: Arguments) -> Iterable[Any]:
    """Batches of validation data: as for training, or (x, y) or (x, y, sample_weight) of tensors and arrays."""
    parts = data if isinstance(data, tuple) and len(data) in (2, 3) and is_rows(data[:2]) else (data,)
    if batch_size is None and (len(parts) > 1 or has_rows(data)):
        batch_size = default
    return as_batches(*parts, batch_size=batch_size, argument="validation_data", arguments=arguments)


def _first_batches(batches: Iterable[Any], number: int | float) -> list[Any]:
    """The batches to overfit, drawn once."""
    counted = EpochIterator(batches, argument="x", limit=number, steps=None)
    return [batch for _, batch in islice(counted, counted.num_batches)]
