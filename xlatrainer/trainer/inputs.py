"""What the data arguments of fit, evaluate and predict stand for: the batches to go through."""

from typing import Any

import numpy as np
from torch import Tensor

from xlatrainer.data.adapters import rows_as_batches
from xlatrainer.data.epoch_iterator import EpochIterator

__all__ = ["batches_to_evaluate", "batches_to_predict", "batches_to_train"]

_BATCH_SIZE = 32


def batches_to_train(
    x: Any,
    y: Any = None,
    *,
    epochs: int,
    validation_data: Any = None,
) -> tuple[EpochIterator, EpochIterator | None]:
    """The batches of an epoch, and those of its validation; see `Trainer.fit`."""
    _refuse_pair(y)
    batches = EpochIterator(x, argument="data", epochs=epochs)
    if validation_data is None:
        return batches, None
    return batches, EpochIterator(validation_data, argument="validation_data", epochs=epochs)


def batches_to_evaluate(x: Any, y: Any = None) -> EpochIterator:
    """The batches of `Trainer.evaluate`."""
    _refuse_pair(y)
    return EpochIterator(x)


def batches_to_predict(x: Any, batch_size: int | None = None) -> EpochIterator:
    """The batches of `Trainer.predict`."""
    if isinstance(x, Tensor | np.ndarray):
        return EpochIterator(list(rows_as_batches(x, _BATCH_SIZE if batch_size is None else batch_size)))
    if batch_size is not None:
        raise ValueError("batch_size is for a tensor or array; the data given comes in batches already")
    return EpochIterator(x)


def _refuse_pair(y: Any) -> None:
    if y is not None:
        raise TypeError("x and y as tensors: pass a DataLoader over TensorDataset(x, y) instead")
