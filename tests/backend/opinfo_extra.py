"""Calls for the lowerings that torch's database does not reach: `name -> (function, inputs)`.

Overloads that take nothing but tensors, numbers and lists of them get their arguments from the schema.
"""

from collections.abc import Callable
from typing import Any

import torch

from xlatrainer.backend.lowerings.registry import registered

__all__ = ["BY_SCHEMA", "CALLS", "arguments_by_schema"]

aten = torch.ops.aten


def _uniform(*shape: int, low: float = 0.1, high: float = 0.9, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator) * (high - low) + low


# Names, without `aten::`, of the lowerings that are called with what their schema says.
BY_SCHEMA = sorted(
    name.removeprefix("aten::")
    for name in registered()
    if name.startswith("aten::_foreach_") or name.endswith((".n_scalar", ".x_scalar"))
)


def arguments_by_schema(overload: Any) -> list[Any]:
    """Arguments for what an overload must be given: tensors of numbers between 0 and 1, and plain numbers."""
    made: list[Any] = []
    for position, argument in enumerate(overload._schema.arguments):
        kind = str(argument.type)
        if argument.has_default_value() or argument.kwarg_only:
            continue
        if kind == "Tensor" and overload._schema.name.startswith("aten::_foreach_"):
            made.append(torch.tensor(0.7))
        elif kind == "Tensor":
            made.append(_uniform(4, seed=position) * (1 if argument.name == "x" else 4))
        elif kind == "List[Tensor]":
            made.append([_uniform(*shape, seed=position) for shape in ((3,), (2, 4), ())])
        elif kind == "List[number]":
            made.append([0.5, 2, 1.5])
        elif kind == "number":
            made.append(3 if argument.name == "n" else 0.6)
        else:
            raise TypeError(f"{overload}: nothing to give for {kind}")
    return made


def _kaiser(x: torch.Tensor) -> list[torch.Tensor]:
    window = torch.kaiser_window
    device = {"device": x.device}
    return [window(n, **device) for n in (0, 1, 2, 7)] + [window(6, False, **device), window(9, True, 3.5, **device)]


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "kaiser_window": (_kaiser, (torch.zeros(()),)),
}
