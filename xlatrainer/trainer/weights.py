"""A model's weights by name: which of them are one tensor, and how saved ones get into a model.

Owns names: ties, maps from one name to another, and the report of what did not fit. Files are the business of `files`.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Loaded", "NameMap", "load_into", "model_state", "renamed"]

NameMap = Mapping[str, str] | Callable[[str], str | None]


class Loaded(NamedTuple):
    """What did not fit when weights were loaded with `strict=False`; tied weights count as there if one of them is.

    Attributes:
        missing_keys: Names of the model that the file did not have; their values are as they were.
        unexpected_keys: Names of the file that the model does not have.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """The state of `model` as (tensors by name, further names of tied tensors, what is no tensor).

    A tied tensor is under its first name; the further names have that one as value.
    """
    weights: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    others: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():  # the Parameters themselves: a tied one is one object
        if not isinstance(value, Tensor):
            others[name] = value
        elif id(value) in first:
            tied[name] = first[id(value)]
        else:
            first[id(value)] = name
            weights[name] = value
    return weights, tied, others


def renamed(weights: Mapping[str, Tensor], names: NameMap | None) -> dict[str, Tensor]:
    """The weights under the names of the model.

    Args:
        weights: By their names in the file.
        names: A function from a name to the model's, or None to leave it out; or a dict of names, and of beginnings of
            names that end with a dot or are empty, the longest that fits counting. Default None, the same names.

    Raises:
        ValueError: If two names become one.

    Example:
        >>> import torch
        >>> list(renamed({"encoder.weight": torch.zeros(1), "bias": torch.zeros(1)}, {"encoder.": "backbone."}))
        ['backbone.weight', 'bias']
    """
    if names is None:
        return dict(weights)
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        new = names(name) if callable(names) else _mapped(name, names)
        if new is None:
            continue
        if new in found:
            raise ValueError(f"the map gives two of the saved weights the name {new!r}; the second one is {name!r}")
        found[new] = tensor
    return found


def load_into(
    model: nn.Module, weights: Mapping[str, Any], tied: Mapping[str, str], *, strict: bool, where: str
) -> Loaded:
    """Copy weights into `model`, in place.

    Args:
        model: On any device.
        weights: By the model's names; further entries of its `state_dict` may be among them.
        tied: Further names, each with the name of the weight that it is the same as.
        strict: Whether every name must be there on both sides.
        where: What is loaded, for messages.

    Raises:
        RuntimeError: If the names (with `strict`) or the shapes do not fit; PyTorch's message lists them.
    """
    _, own_ties, _ = model_state(model)
    groups: dict[str, list[str]] = defaultdict(list)
    for other, first in own_ties.items():
        groups[first].append(other)
    given = dict(weights)
    for other, first in tied.items():
        if first in given and own_ties.get(other, other) != own_ties.get(first, first) and other not in given:
            given[other] = given[first]
            warnings.warn(
                f"{first} and {other} are one weight in {where} and two in this model: they begin with the same values "
                f"and will come apart. Tie them before creating the Trainer",
                stacklevel=3,
            )
    for first, others in groups.items():
        held = next((given[name] for name in [first, *others] if name in given), None)
        if held is not None:  # under every name, which is what PyTorch's strict loading asks for
            given.update(dict.fromkeys([first, *others], held))
    result = model.load_state_dict(given, strict=strict)
    return Loaded(list(result.missing_keys), list(result.unexpected_keys))


def _mapped(name: str, names: Mapping[str, str]) -> str:
    if name in names:
        return names[name]
    beginnings = [old for old in names if (old.endswith(".") or not old) and name.startswith(old)]
    if not beginnings:
        return name
    old = max(beginnings, key=len)
    return names[old] + name[len(old) :]
