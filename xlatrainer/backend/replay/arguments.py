"""The arguments of a call, laid out flat, and what of each decides which plan serves.

May import: host_arguments, tensor, _private_api, torch, numpy.
"""

from typing import Any

import numpy as np
import torch

from xlatrainer.backend._private_api import tree_flatten
from xlatrainer.backend.replay.host_arguments import is_plain
from xlatrainer.backend.tensor import storage_data

__all__ = ["flattened", "kind_of"]

_LEAF = "leaf"
_INEXACT = (float, complex, np.inexact)


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested arguments in the order of torch's pytrees, and their structure, to compare.

    Tuples, lists and dicts are looked into here, in a fifth of the time; torch is asked for whatever else there is.
    """
    leaves: list[Any] = []
    return leaves, _structure(tree, leaves)


def _structure(tree: Any, leaves: list[Any]) -> Any:
    kind = type(tree)
    if kind is tuple or kind is list:
        return (kind, *[_structure(item, leaves) for item in tree])
    if kind is dict:
        return (kind, tuple(tree), *[_structure(item, leaves) for item in tree.values()])
    if isinstance(tree, torch.Tensor) or tree is None or kind is int:
        leaves.append(tree)
        return _LEAF
    found, structure = tree_flatten(tree)
    leaves += found
    return structure


def kind_of(leaf: Any) -> Any:
    """What of an argument decides which plan serves: all of a plain value, of a tensor everything but its contents."""
    if not isinstance(leaf, torch.Tensor):
        if isinstance(leaf, _INEXACT):
            return type(leaf), repr(leaf)  # 0.0 equals -0.0
        return type(leaf), leaf if is_plain(leaf) else id(leaf)
    layout = (tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.stride(), leaf.storage_offset())
    if leaf.device.type != "xla":
        return layout, str(leaf.device)
    data = storage_data(leaf)
    return layout, None if data.value is None else data.value.spec, leaf.is_conj(), leaf.is_neg()
