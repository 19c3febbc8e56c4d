"""Apply a function to every tensor of a nested batch: tuples, named tuples, lists, dicts and dataclasses, however deep.

Owns the shape of a batch or a model's output, nothing of devices. NumPy arrays count as tensors; whatever else is
found in the structure (strings, numbers, None) is kept as it is. A class of one's own that holds tensors takes part as
a `DataWrapper`.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["DataWrapper", "map_tensors", "tensors_in"]


class DataWrapper:
    """Base of classes of one's own that hold tensors of a batch: says which they are, and how to make another.

    Example:
        >>> class Boxes(DataWrapper):
        ...     def __init__(self, corners, image_name):
        ...         self.corners, self.image_name = corners, image_name
        ...
        ...     def get_tensors(self):
        ...         return [self.corners]
        ...
        ...     def from_tensors(self, tensors):
        ...         return Boxes(tensors[0], self.image_name)
        >>> doubled = map_tensors(lambda t: t * 2, [Boxes(torch.ones(2), "a.jpg")])[0]
        >>> doubled.corners, doubled.image_name
        (tensor([2., 2.]), 'a.jpg')
    """

    def get_tensors(self) -> list[Any]:
        """The tensors to move, in an order of one's own choice; tuples, dicts and so on of them too."""
        raise NotImplementedError("The method is missing an implementation")

    def from_tensors(self, tensors: list[Any]) -> Any:
        """The same object with these tensors in place of those of `get_tensors`, in its order."""
        raise NotImplementedError("The method is missing an implementation")


_OF_PACKED = ("data", "sorted_indices", "unsorted_indices")


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """A copy of `tree` with each tensor replaced by `function(tensor)`, in the order of `tensors_in`.

    Args:
        function: Called with each tensor, and with each NumPy array after `torch.as_tensor`.
        tree: A tensor, or tuples, named tuples, lists, mappings, dataclasses and `DataWrapper`s of such, nested. The
            `batch_sizes` of a `PackedSequence` are left out: torch wants them on the CPU.

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
    if isinstance(tree, PackedSequence):
        parts = {name: map_tensors(function, getattr(tree, name)) for name in _OF_PACKED}
        return tree._replace(**parts)
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
    if isinstance(tree, DataWrapper):
        return tree.from_tensors(map_tensors(function, list(tree.get_tensors())))
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
    elif isinstance(tree, PackedSequence):
        for name in _OF_PACKED:
            yield from tensors_in(getattr(tree, name))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)
    elif _is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))
    elif isinstance(tree, DataWrapper):
        yield from tensors_in(list(tree.get_tensors()))


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)
