"""Arithmetic for lowerings that run for each parameter, or hundreds of times in a program.

An operator of `jax.numpy`, `+` of arrays included, is a compiled function of its own: it looks itself up in caches,
promotes its operands, and is then copied into the program. That takes several times what the operator of `jax.lax` in
it takes. The functions here record the same for operands that were promoted already.

Operands are arrays of one dtype, of shapes that broadcast, or numbers of Python, which take that dtype; one of them at
least is an array.

May import: jax, numpy.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

__all__ = ["add", "converted", "div", "less", "less_equal", "mul", "sub", "where"]


def _binary(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def call(first: Any, second: Any) -> Any:
        return function(*_alike(first, second))

    return call


def _alike(*operands: Any) -> list[Any]:
    """As `jax.lax` takes them: of one dtype and one rank, where they are not 0-dim."""
    arrays = [operand for operand in operands if isinstance(operand, jax.Array)]
    dtype, rank = arrays[0].dtype, max(array.ndim for array in arrays)
    return [
        _with_rank(operand, rank) if isinstance(operand, jax.Array) else np.asarray(operand, dtype)
        for operand in operands
    ]


def _with_rank(array: Any, rank: int) -> Any:
    return lax.expand_dims(array, range(rank - array.ndim)) if 0 < array.ndim < rank else array


add = _binary(lax.add)
sub = _binary(lax.sub)
mul = _binary(lax.mul)
div = _binary(lax.div)
less = _binary(lax.lt)
less_equal = _binary(lax.le)


def where(condition: Any, first: Any, second: Any) -> Any:
    """`first` where the bools `condition` are true, else `second`."""
    dtype = next(each.dtype for each in (first, second) if isinstance(each, jax.Array))
    arrays = [each if isinstance(each, jax.Array) else np.asarray(each, dtype) for each in (condition, first, second)]
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    return lax.select(*(_with_shape(array, shape) for array in arrays))


def _with_shape(array: Any, shape: tuple[int, ...]) -> Any:
    if array.shape == shape:
        return array
    lead = len(shape) - array.ndim
    kept = [axis for axis, size in enumerate(array.shape) if size == shape[lead + axis]]
    if len(kept) < array.ndim:
        array = lax.squeeze(array, [axis for axis in range(array.ndim) if axis not in kept])
    return lax.broadcast_in_dim(array, shape, [lead + axis for axis in kept])


def converted(array: Any, dtype: Any) -> Any:
    """`array` in a dtype, as it is if it has that."""
    if isinstance(array, jax.Array) and array.dtype == dtype and not array.weak_type:
        return array
    return lax.convert_element_type(array, dtype)
