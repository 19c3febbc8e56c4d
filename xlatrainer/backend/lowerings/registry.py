"""`@lowering` and `@pointwise`: an operator is added by one decorated function.

A lowering takes JAX arrays where the ATen schema has tensors, in the schema's order and under its names, and returns
the array, or tuple of arrays, of the schema's results. It must give exactly the shapes and dtypes that torch's meta
kernel gives; the executor checks that. It knows nothing of tensors, traces and devices, so plain arrays test it.

Python numbers that the operator computes with arrive as 0-dim arrays (see `Number` for pointwise operators), since they
are inputs of the program. A lowering whose Python code depends on a number names the argument in `static`; it then
gets the Python number, and a new one compiles a new program.

Operators of other libraries are named with their namespace (`torchvision::roi_align`). Such a library need not be there
and is not imported; its operators work as soon as somebody imports it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import torch

from xlatrainer.backend.dtypes import Operand, compute_dtype, number_dtype, result_type, to_numpy
from xlatrainer.backend.dtypes import from_numpy as torch_dtype
from xlatrainer.backend.lowerings.arithmetic import converted

__all__ = ["Lowering", "Number", "find", "foreign", "lowering", "pointwise", "registered", "resolve"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Number(NamedTuple):
    """A Python number inside a program: a 0-dim array of the widest type, and the dtype torch gives such a number."""

    array: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class Lowering:
    """One registered function.

    Attributes:
        name: the overload, `aten::add.Tensor`.
        overload: the same as an `OpOverload`; None for an operator of another library, which may come later.
        function: JAX arrays to JAX arrays.
        static: names of arguments whose numbers stay constants.
        mutates: names of tensor arguments that the operator updates though its schema does not say so (running
            statistics); the function returns their new values after its results.
        random: the function takes a `key`, a JAX random key of its own for each call.
        takes_specs: the function takes `out_specs`, the specs of the results, and `Number`s instead of arrays.
        supports: given the call's arguments as torch has them, says whether the function can express the call; where it
            says no, the call runs on the CPU. For what depends on dtypes or options only: it must not read data.
    """

    name: str
    overload: Any
    function: Callable[..., Any]
    static: frozenset[str] = frozenset()
    mutates: tuple[str, ...] = ()
    random: bool = False
    takes_specs: bool = False
    supports: Callable[..., bool] | None = None


_registry: dict[str, Lowering] = {}
_foreign: dict[str, Lowering] = {}


def resolve(name: str) -> Any | None:
    """The `OpOverload` of `name` (`add.Tensor`, `torchvision::nms`), or None if there is no such operator."""
    namespace, _, operator = name.rpartition("::")
    base, _, variant = operator.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
    return getattr(packet, variant or "default", None) if packet is not None else None


def _register(name: str, function: Callable[..., Any], **options: Any) -> None:
    is_foreign = "::" in name
    overload = None if is_foreign else resolve(name)
    if overload is None and not is_foreign:
        return  # an operator that this release of torch does not have
    full = name if is_foreign else f"aten::{name}"
    table = _foreign if is_foreign else _registry
    if full in table:
        raise ValueError(f"{full} has a lowering already: {table[full].function.__qualname__}")
    table[full] = Lowering(full, overload, function, **options)


def find(name: str) -> Lowering | None:
    """The lowering of an overload, by its full name (`aten::add.Tensor`; `aten::relu` for the default overload)."""
    return _registry.get(name.removesuffix(".default"))


def registered() -> dict[str, Lowering]:
    """All lowerings of torch's own operators by name, as a copy."""
    return dict(_registry)


def foreign() -> dict[str, Lowering]:
    """All lowerings of operators of other libraries by name, as a copy."""
    return dict(_foreign)


def lowering(
    *names: str,
    static: tuple[str, ...] = (),
    mutates: tuple[str, ...] = (),
    random: bool = False,
    takes_specs: bool = False,
    supports: Callable[..., bool] | None = None,
) -> Callable[[_F], _F]:
    """Register a function as the lowering of the overloads `names`; options: see `Lowering`.

    torch's own are named without `aten::`, those of another library with its namespace.
    """

    def register(function: _F) -> _F:
        for name in names:
            options = {"mutates": mutates, "random": random, "takes_specs": takes_specs, "supports": supports}
            _register(name, function, static=frozenset(static), **options)
        return function

    return register


# Scalar arguments that take part in type promotion as if they were tensors; others (alpha, value) follow the result.
_PROMOTING = frozenset({"self", "other", "exponent", "min", "max", "x", "n"})


def pointwise(*names: str, to: str = "operands", static: tuple[str, ...] = ()) -> Callable[[_F], _F]:
    """Register an elementwise lowering whose operands are promoted by torch's rules first.

    Args:
        names: overloads without `aten::`.
        to: `operands` computes in the operands' common dtype, `float` in the same but the default float dtype where
            that is integral or bool, `result` in the dtype of the result. Half types are computed in float32, as torch
            does.
        static: see `lowering`.
    """
    if to not in ("operands", "float", "result"):
        raise ValueError(f"to={to!r}; accepted are 'operands', 'float' and 'result'")

    def register(function: _F) -> _F:
        for name in names:
            overload = resolve(name)
            if overload is not None:
                wrapped = _promoted(function, overload, to)
                _register(name, wrapped, static=frozenset(static), takes_specs=True)
        return function

    return register


def _promotes(argument: Any) -> bool:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        return True
    return kind in ("number", "Optional[number]") and argument.name in _PROMOTING


def _promoted(function: Callable[..., Any], overload: Any, to: str) -> Callable[..., Any]:
    arguments = overload._schema.arguments
    positions = [i for i, argument in enumerate(arguments) if _promotes(argument)]
    names = {argument.name for argument in arguments if _promotes(argument)}

    def call(*args: Any, out_specs: tuple[Any, ...], **kwargs: Any) -> Any:
        out = out_specs[0].dtype
        taking_part = [args[i] for i in positions if i < len(args)] + [kwargs[n] for n in names if n in kwargs]
        common = _common_dtype(taking_part, out, to)
        dtype = compute_dtype(common)

        def convert(arg: Any) -> Any:
            array = arg.array if isinstance(arg, Number) else arg
            return converted(array, dtype) if isinstance(array, jax.Array) else array

        result = function(*map(convert, args), **{name: convert(arg) for name, arg in kwargs.items()})
        return converted(result, to_numpy(out))

    call.__module__ = function.__module__
    call.__qualname__ = getattr(function, "__qualname__", repr(function))
    call.__doc__ = function.__doc__
    return call


def _common_dtype(operands: list[Any], out: torch.dtype, to: str) -> torch.dtype:
    if to == "result":
        return out
    described = []
    for operand in operands:
        if isinstance(operand, Number):
            described.append(Operand(operand.dtype, 0, wrapped=True))
        elif isinstance(operand, bool | int | float | complex):
            described.append(Operand(number_dtype(type(operand)), 0, wrapped=True))
        elif operand is not None:
            described.append(Operand(torch_dtype(operand.dtype), jnp.ndim(operand)))
    common = result_type(described)
    if to == "float" and not (common.is_floating_point or common.is_complex):
        return out if out.is_floating_point or out.is_complex else torch.get_default_dtype()
    return common
