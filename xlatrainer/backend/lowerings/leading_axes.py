"""Reductions over leading axes of long rows, on the CPU.

XLA's CPU backend leaves reductions of floating point numbers to a library whose time for a number grows a hundredfold
once rows of more than some 16,000 of them remain, unless four such results lie in front: 8 x 1024 x 768, summed over
the first axis as for the gradient of a position embedding, took 72 ms, and takes 0.7 here (`benchmarks/reduction.py`).
Sums are products with ones, of parts that are added first if there are many rows; other reductions combine parts, too.

May import: platforms, jax.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from itertools import groupby
from typing import Any

import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.lowerings.platforms import on_cpu_or_else

__all__ = ["maximum", "minimum", "total"]

LONG_ROW = 16_384  # elements behind the axes
_FEW = 3  # elements in front of them
_PARTS = 16  # of many rows
_ROWS_OF_A_PRODUCT = 64  # which adds one after the other; more would add up their roundings


def total(array: Any, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """The sum over `axes`, of the dtype that `jnp.sum` gives."""
    return _reduced(jnp.sum, _added, array, axes, keepdims)


def maximum(array: Any, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """The largest element over `axes`, NaN if there is one."""
    return _reduced(jnp.max, partial(_combined, lax.max), array, axes, keepdims)


def minimum(array: Any, axes: tuple[int, ...], keepdims: bool = False) -> Any:
    """The smallest element over `axes`, NaN if there is one."""
    return _reduced(jnp.min, partial(_combined, lax.min), array, axes, keepdims)


def _reduced(
    usual: Callable[..., Any], rows_to_one: Callable[[Any], Any], array: Any, axes: tuple[int, ...], keepdims: bool
) -> Any:
    """`usual`, or on the CPU and where that is slow `rows_to_one` of matrices with a row for each element of `axes`."""

    def as_usual(array: Any) -> Any:
        return usual(array, axis=axes, keepdims=keepdims)

    def by_rows(array: Any) -> Any:
        matrices = array.reshape(outer, count, -1)
        result = jnp.stack([rows_to_one(matrices[index]) for index in range(outer)])
        kept = enumerate(array.shape)
        return result.reshape([1 if axis in axes else size for axis, size in kept if keepdims or axis not in axes])

    outer, count, length = _around(array.shape, axes)
    if outer <= _FEW and count > 1 and length >= LONG_ROW and array.dtype in (jnp.float32, jnp.float64):
        return on_cpu_or_else(by_rows, as_usual, array)
    return as_usual(array)


def _around(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int, int]:
    """How many elements lie in front of `axes`, in them, and behind them; 0 where others lie between them."""
    counted = [(size, axis in axes) for axis, size in enumerate(shape) if size != 1]
    groups = [
        (inside, math.prod(size for size, _ in group)) for inside, group in groupby(counted, lambda each: each[1])
    ]
    if groups and groups[0][0]:
        groups.insert(0, (False, 1))
    if len(groups) != 3:
        return 0, 0, 0
    return groups[0][1], groups[1][1], groups[2][1]


def _added(rows: Any) -> Any:
    if rows.shape[0] > _ROWS_OF_A_PRODUCT:
        return _by_parts(lax.add, rows, _added)
    ones = jnp.ones(rows.shape[0], rows.dtype)
    return lax.dot_general(ones, rows, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)


def _combined(combine: Callable[[Any, Any], Any], rows: Any) -> Any:
    if rows.shape[0] > _PARTS:
        return _by_parts(combine, rows, partial(_combined, combine))
    return reduce(combine, [lax.index_in_dim(rows, row, keepdims=False) for row in range(rows.shape[0])])


def _by_parts(combine: Callable[[Any, Any], Any], rows: Any, rows_to_one: Callable[[Any], Any]) -> Any:
    """Parts of equal size are combined, row by row, then the rows of the result; then what was left over."""
    size, rest = divmod(rows.shape[0], _PARTS)
    parts = [lax.slice_in_dim(rows, part * size, (part + 1) * size) for part in range(_PARTS)]
    row = rows_to_one(reduce(combine, parts))
    return combine(row, rows_to_one(lax.slice_in_dim(rows, size * _PARTS, None))) if rest else row
