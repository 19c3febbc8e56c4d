"""Apply a function to every tensor of a nested batch: tuples, named tuples, lists, dicts and dataclasses, however deep.

Owns the shape of a batch or a model's output, nothing of devices. NumPy arrays count as tensors; whatever else is
found in the structure (strings, numbers, None) is kept as it is.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """A copy of `tree` with each tensor replaced by `function(tensor)`, in the order of `tensors_in`.

    Args:
        function: Called with each tensor, and with each NumPy array after `torch.as_tensor`.
        tree: A tensor, or tuples, named tuples, lists, mappings and dataclasses of such, nested.

    Returns:
        The same structure; a mapping comes back as a plain dict, a dataclass as a copy.

    Example:
        >>> map_tensors(lambda t: t.shape, {"ids": torch.zeros(2, 3), "name": "first"})
        {'ids': torch.Size([2, 3]), 'name': 'first'}
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, np.ndarray):
        return function(torch.as_tensor(tree))
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, value) for value in tree)
    if _is_dataclass(tree):
        mapped = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # as a frozen one, too, is filled
            object.__setattr__(mapped, field.name, map_tensors(function, getattr(tree, field.name)))
        return mapped
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors of `tree`, depth first, in the order `map_tensors` visits them."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, np.ndarray):
        yield torch.as_tensor(tree)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)
    elif _is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)
