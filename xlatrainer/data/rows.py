"""`RowBatches`: batches of the rows of tensors and arrays, in order or shuffled anew in each pass."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xlatrainer.data.batch import as_tensor

__all__ = ["RowBatches", "is_rows"]


class RowBatches:
    """Gone through once an epoch: the rows of `columns` in batches.

    Args:
        columns: What a batch is made of: tensors and NumPy arrays of shape (rows, ...), nested in tuples, lists and
            dicts; None stays None. Arrays share their memory with the batches that are not shuffled, except for
            float64, which becomes torch's default dtype.
        batch_size: Rows in a batch, at least 1; the last batch may be shorter.
        shuffle: Whether to draw a new order for each pass, from torch's CPU generator. Default False.
        names: What the caller calls the items of `columns`, a tuple then, for the messages.

    Raises:
        ValueError: For different numbers of rows, no rows at all, and a batch size below 1.
        TypeError: For a batch size that is no int.

    Example:
        >>> batches = RowBatches((torch.arange(5), None), batch_size=2)
        >>> len(batches), [x.tolist() for x, _ in batches]
        (3, [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self, columns: Any, batch_size: int, shuffle: bool = False, names: tuple[str, ...] = ("the data",)
    ) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool):
            raise TypeError(f"batch_size must be an int, got {batch_size!r}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self._columns = _map(as_tensor, columns)
        self.num_rows = _num_rows(self._columns, names)
        self.batch_size = batch_size
        self.shuffle = shuffle

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.num_rows) if self.shuffle else None
        for start in range(0, self.num_rows, self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield self._take(rows if order is None else order[rows])

    def split(self, at: int, batch_size: int | None = None) -> tuple["RowBatches", "RowBatches"]:
        """The first `at` rows, and the others, which are not shuffled; `batch_size` is theirs, None for the same."""
        first = RowBatches(self._take(slice(at)), self.batch_size, self.shuffle)
        return first, RowBatches(self._take(slice(at, None)), batch_size or self.batch_size)

    def _take(self, rows: slice | Tensor) -> Any:
        return _map(lambda tensor: tensor[rows.to(tensor.device) if isinstance(rows, Tensor) else rows], self._columns)


def is_rows(value: Any) -> bool:
    """Whether `value` is a tensor or array, or a dict, tuple or list of such: what `RowBatches` takes rows of."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(is_rows, value.values()))
    if isinstance(value, tuple | list):
        return bool(value) and all(map(is_rows, value))
    return isinstance(value, Tensor | np.ndarray)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `function` applied to its tensors and arrays."""
    if isinstance(tree, Mapping):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_map(function, value) for value in tree)
    return None if tree is None else function(tree)


def _num_rows(columns: Any, names: tuple[str, ...]) -> int:
    """How many rows all of `columns` have."""
    parts = list(columns) if len(names) > 1 else [columns]
    found: dict[str, list[int]] = {}
    for name, part in zip(names, parts, strict=True):
        shapes: list[torch.Size] = []
        _map(lambda tensor, shapes=shapes: shapes.append(tensor.shape), part)  # type: ignore[misc]
        for shape in shapes:
            if not shape or shape[0] == 0:
                raise ValueError(f"there must be at least one row; {name} has a tensor of shape {tuple(shape)}")
            found.setdefault(name, []).append(shape[0])
    counts = {count for each in found.values() for count in each}
    if len(counts) != 1:
        said = ", ".join(f"{name}: {' and '.join(map(str, dict.fromkeys(each)))}" for name, each in found.items())
        raise ValueError(f"all tensors and arrays must have the same number of rows, got {said}")
    return counts.pop()
