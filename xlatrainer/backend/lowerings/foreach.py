"""`_foreach_*`: one node for a list of tensors, made of the lowering of the operator for one.

torch's optimizers call these by default on this device, so that a step of SGD or Adam is a handful of nodes.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from xlatrainer.backend.lowerings.registry import find, lowering, resolve

_UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma"),
    *("log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt"),
    *("tan", "tanh", "trunc"),
)
# foreach operator -> variant -> overload for one tensor
_BINARY = {"List": "Tensor", "Scalar": "Tensor", "ScalarList": "Tensor", "Tensor": "Tensor"}
_BASES: dict[str, dict[str, str]] = {name: {"": name} for name in _UNARY}
_BASES.update({name: {v: f"{name}.{base}" for v, base in _BINARY.items()} for name in ("add", "sub", "mul", "div")})
_BASES.update({name: dict.fromkeys(("List", "Scalar", "ScalarList"), name) for name in ("maximum", "minimum")})
_BASES.update({name: dict.fromkeys(("Scalar", "ScalarList"), name) for name in ("addcmul", "addcdiv")})
_BASES["lerp"] = {"List": "lerp.Tensor", "Scalar": "lerp.Scalar", "ScalarList": "lerp.Scalar"}
_BASES["pow"] = {"List": "pow.Tensor_Tensor", "Scalar": "pow.Tensor_Tensor", "ScalarList": "pow.Tensor_Tensor"}
_BASES["pow"]["ScalarAndTensor"] = "pow.Scalar"
_BASES["clamp_max"] = dict.fromkeys(("List", "Scalar", "ScalarList"), "minimum")
_BASES["clamp_min"] = dict.fromkeys(("List", "Scalar", "ScalarList"), "maximum")


def _for_each(base: str) -> Callable[..., Any]:
    """Apply the lowering of `base` to the i-th item of every list; arguments that are no list go to each."""

    def function(*args: Any, out_specs: tuple[Any, ...], **kwargs: Any) -> list[Any]:
        found = find(f"aten::{base}")
        if found is None:
            raise NotImplementedError(f"aten::{base} has no lowering, which this foreach operator is made of")
        results = []
        for i, spec in enumerate(out_specs):
            items = [arg[i] if isinstance(arg, list) else arg for arg in args]
            results.append(found.function(*items, out_specs=(spec,), **kwargs))
        return results

    return function


for _name, _variants in _BASES.items():
    for _variant, _base in _variants.items():
        _full = f"_foreach_{_name}.{_variant}".removesuffix(".")
        if resolve(_full) is not None:
            lowering(_full, takes_specs=True)(_for_each(_base))


@lowering("_foreach_zero")
def _foreach_zero(self):
    return [jnp.zeros_like(tensor) for tensor in self]


@lowering("_foreach_copy", takes_specs=True)
def _foreach_copy(self, src, non_blocking=False, *, out_specs):
    return [jnp.broadcast_to(s, t.shape).astype(t.dtype) for t, s in zip(self, src, strict=True)]


@lowering("_foreach_norm.Scalar", static=("ord",))
def _foreach_norm(self, ord=2, dtype=None):
    return [_vector_norm(tensor.reshape(-1), ord) for tensor in self]


def _vector_norm(flat: Any, ord: float) -> Any:
    magnitude = jnp.abs(flat)
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(magnitude)))
    if ord == float("inf"):
        return jnp.max(magnitude, initial=0)
    if ord == 1:
        return jnp.sum(magnitude)
    if ord == 0:
        return jnp.sum(magnitude != 0).astype(magnitude.dtype)
    return jnp.sum(magnitude**ord) ** (1 / ord)
