"""Turns what a user passes as data into something that yields batches, or says why it cannot.

Host side only: knows nothing of devices, models or steps. The batches themselves are passed on untouched.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

__all__ = ["as_batches", "rows_as_batches"]


def as_batches(data: Any, *, argument: str) -> Iterable[Any]:
    """`data` itself if iterating over it can yield batches.

    Args:
        data: A DataLoader, a list of batches, or any other iterable of batches.
        argument: What the caller calls this argument, for the messages.

    Raises:
        TypeError: For a single tensor, array or dict, a pair of tensors, a Dataset and everything not iterable.
    """
    accepted = f"{argument} must be a DataLoader or another iterable of (inputs, targets) batches"
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"{accepted}; got the dataset {type(data).__name__}, which yields single examples. "
            f"Pass torch.utils.data.DataLoader(dataset, batch_size=...)"
        )
    if isinstance(data, Tensor | np.ndarray):
        raise TypeError(f"{accepted}; got {_describe(data)}. {_PAIR_ADVICE}")
    if isinstance(data, tuple) and any(isinstance(item, Tensor | np.ndarray) for item in data):
        raise TypeError(f"{accepted}; got a tuple of {', '.join(_describe(item) for item in data)}. {_PAIR_ADVICE}")
    if isinstance(data, Mapping | str | bytes) or not isinstance(data, Iterable):
        raise TypeError(f"{accepted}; got {type(data).__name__}")
    return data


def rows_as_batches(tensor: Tensor | np.ndarray[Any, Any], batch_size: int) -> tuple[Tensor, ...]:
    """The rows of `tensor` in batches of `batch_size`; the last one may be shorter.

    Args:
        tensor: Shape (rows, ...); any dtype.
        batch_size: Rows in a batch, at least 1.

    Raises:
        ValueError: For a tensor without rows, and for a batch size below 1.

    Example:
        >>> [len(batch) for batch in rows_as_batches(torch.zeros(5, 2), 2)]
        [2, 2, 1]
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    rows = torch.as_tensor(tensor)
    if rows.dim() == 0 or rows.shape[0] == 0:
        raise ValueError(f"there must be at least one row to predict; got a tensor of shape {tuple(rows.shape)}")
    return rows.split(batch_size)


_PAIR_ADVICE = (
    "For tensors x and y pass torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=...)"
)


def _describe(item: Any) -> str:
    if isinstance(item, Tensor | np.ndarray):
        return f"{'tensor' if isinstance(item, Tensor) else 'array'} of shape {tuple(item.shape)}"
    return type(item).__name__


def is_one_shot(batches: Iterable[Any]) -> bool:
    """Whether `batches` is an iterator (a generator, say): it can be gone through once, and never restarts."""
    return isinstance(batches, Iterator)
