"""What an ATen schema says: functional, in-place or out=, which arguments are written, which functional twin there is.

May import: torch. Nothing is written by hand that a schema states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "Signature",
    "argument_names",
    "by_name",
    "functional_twin",
    "gives_results",
    "lifted_positions",
    "makes_tensor",
    "plain_positions",
    "signature",
]

# Functional twins that the naming rule does not find.
_TWINS = {
    "aten::conj_physical_": "aten::_conj_physical",
    "aten::conj_physical.out": "aten::_conj_physical",
    "aten::normal_": "aten::normal_functional",
    "aten::bernoulli_.float": "aten::bernoulli.p",
    "aten::bernoulli.float_out": "aten::bernoulli.p",
    "aten::rrelu_with_noise_": "aten::rrelu_with_noise_functional",
}
_NUMBER_TYPES = (
    "number",
    "Optional[number]",
    "List[number]",
    "float",
    "Optional[float]",
    "Optional[List[float]]",
    "List[float]",
)
_TENSOR_TYPES = ("Tensor", "Optional[Tensor]")
_PLAIN_TYPES = ("int", "bool", "List[int]", "List[bool]", "Optional[int]", "Optional[bool]", "Optional[List[int]]")


@dataclass(frozen=True)
class Signature:
    """The arguments of an overload that its schema says are written, by name, and whether they are `out=` arguments."""

    written: tuple[str, ...]
    out: bool

    @property
    def functional(self) -> bool:
        return not self.written


def signature(overload: Any) -> Signature:
    """Read the schema of `overload`."""
    written = []
    out = False
    for argument in overload._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name)
            out = out or argument.is_out
    return Signature(tuple(written), out)


def argument_names(overload: Any) -> list[str]:
    """The names of the arguments, in order."""
    return [argument.name for argument in overload._schema.arguments]


def by_name(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names; those that are left out are not in it."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


# What an out= argument says in place of these.
_FACTORY = ("dtype", "layout", "device", "pin_memory")


def _arguments(overload: Any, *, factory: bool = True) -> list[tuple[str, str]]:
    arguments = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
    return arguments if factory else [argument for argument in arguments if argument[0] not in _FACTORY]


def makes_tensor(overload: Any) -> bool:
    """True for a factory: an operator that takes the dtype and device of its result, like `arange`."""
    return {"dtype", "device"} <= {argument.name for argument in overload._schema.arguments}


def gives_results(overload: Any) -> bool:
    """True where an overload that writes arguments also returns tensors that are not those."""
    return any(result.alias_info is None for result in overload._schema.returns)


def functional_twin(overload: Any) -> Any | None:
    """The functional overload that computes what an in-place or out= overload writes, or None.

    Of a factory's out= overload it is the factory. Of an overload that returns results beside what it writes it gives
    both, results first.
    """
    named = _TWINS.get(overload.name())
    base = overload._schema.name.removeprefix("aten::")
    if named:
        base, _, variant = named.removeprefix("aten::").partition(".")
        return getattr(getattr(torch.ops.aten, base), variant or "default")
    if gives_results(overload):
        base += "_functional"
    elif base.startswith("__i") and base.endswith("__"):  # `x <<= 1`
        base = "__" + base.removeprefix("__i")
    elif base.endswith("_") and not base.endswith("__"):
        base = base[:-1]
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return None
    wanted = _arguments(overload)
    for factory in (True, False):
        for variant in packet.overloads():
            twin = getattr(packet, variant)
            if twin is overload or not signature(twin).functional:
                continue
            if _arguments(twin, factory=factory) == wanted and (factory or makes_tensor(twin)):
                return twin
    return None


def lifted_positions(overload: Any, static: frozenset[str]) -> frozenset[int | str]:
    """Arguments, by position and by name, whose Python numbers become inputs of the program instead of constants.

    Those are the numbers the operator computes with: every `Scalar` and `float`, and a number that stands for a tensor.
    Ints that shapes and dims are made of are never among them, nor what a lowering declares static.
    """
    found: set[int | str] = set()
    for position, argument in enumerate(overload._schema.arguments):
        if argument.name in static:
            continue
        kind = str(argument.type)
        if kind in _NUMBER_TYPES or kind in _TENSOR_TYPES:
            found.update((position, argument.name))
    return frozenset(found)


def plain_positions(overload: Any) -> frozenset[int]:
    """Positions of the arguments of which the schema fixes the Python type, so that equal ones mean the same.

    Those are ints and bools, lists of them, and what a schema counts among ints: dtypes, layouts, memory formats.
    """
    kinds = [str(argument.type) for argument in overload._schema.arguments]
    return frozenset(position for position, kind in enumerate(kinds) if kind in _PLAIN_TYPES)
