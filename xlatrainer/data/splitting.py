"""The last part of the data set aside, to validate on."""

import math
from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Subset

from xlatrainer.data.adapters import as_batches
from xlatrainer.data.hugging_face import is_hugging_face, is_stream
from xlatrainer.data.rows import RowBatches

__all__ = ["split_off"]


def split_off(
    x: Any, y: Any, sample_weight: Any, fraction: float, validation_batch_size: int | None, **options: Any
) -> tuple[Iterable[Any], Iterable[Any]]:
    """Batches of `x` without its last rows, and of those: set aside before anything is shuffled, as in Keras.

    Args:
        x, y, sample_weight: As for `as_batches`: tensors and arrays, or a dataset that can be indexed.
        fraction: The part to set aside, in (0, 1); at least one row stays on each side.
        validation_batch_size: Rows in a batch of the part set aside; None for as many as in the others.
        options: Those of `as_batches`. The part set aside is not shuffled.

    Raises:
        TypeError: For data whose last part is not known: loaders, iterables, streams.
        ValueError: For a fraction out of range, or one that leaves one part empty.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"validation_split must be above 0.0 and below 1.0, got {fraction}")
    later = {**options, "shuffle": False, "batch_size": validation_batch_size or options.get("batch_size")}
    if _is_indexed(x):
        at = _at(len(x), fraction)
        first, second = range(at), range(at, len(x))
        parts = (x.select(first), x.select(second)) if is_hugging_face(x) else (Subset(x, first), Subset(x, second))
        return as_batches(parts[0], y, sample_weight, **options), as_batches(parts[1], **later)
    batches = as_batches(x, y, sample_weight, **options)
    if not isinstance(batches, RowBatches):
        raise TypeError(
            f"validation_split is for tensors, arrays and datasets that can be indexed; the last part of a "
            f"{type(x).__name__} is not known before its end. Pass validation_data"
        )
    return batches.split(_at(batches.num_rows, fraction), validation_batch_size)


def _is_indexed(x: Any) -> bool:
    """Whether it is a dataset whose examples have numbers."""
    if is_hugging_face(x):
        return not is_stream(x)
    return isinstance(x, Dataset) and not isinstance(x, IterableDataset) and hasattr(x, "__len__")


def _at(rows: int, fraction: float) -> int:
    at = math.floor(rows * (1.0 - fraction))
    if at in (0, rows):
        raise ValueError(
            f"validation_split={fraction} of {rows} rows leaves none to {'validate' if at else 'train'} on"
        )
    return at
