"""Reading and writing strided views of flat data, as JAX functions.

A torch tensor is a storage seen through sizes, strides and an offset. XLA has no strides, so a view is read by `read`
and written by `write`. Nearly every geometry that PyTorch makes (any chain of view, transpose, select, slice, expand,
diagonal ...) is a reshape, a slice, a transpose and a broadcast of the flat data, which costs XLA little or nothing;
the rest (overlapping windows, odd `as_strided`) is a gather or scatter with constant indices.

May import: jax, numpy, lowerings.fusion.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlatrainer.backend.lowerings.fusion import materialized

__all__ = ["Geometry", "contiguous_strides", "extent", "is_contiguous", "read", "write"]


_LARGE = 2**14  # elements


class Geometry(NamedTuple):
    """Sizes, strides and offset, in elements, of a view over flat data."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, as torch gives them (a size of 0 counts as 1)."""
    strides = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """True if the elements lie in row-major order without gaps."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length == 0:
            return True
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True


def extent(view: Geometry) -> int:
    """Number of elements of flat data that the view needs: one past the last it touches, 0 if it is empty."""
    if math.prod(view.size) == 0:
        return 0
    return view.offset + 1 + sum((length - 1) * step for length, step in zip(view.size, view.stride, strict=True))


class _Blocks(NamedTuple):
    """Flat data as nested blocks: reshaped to `shape`, the view is `start:start+length` of each dim, in `order`."""

    skip: int  # elements of flat data before the first block
    needed: int  # elements of flat data that `shape` covers after them
    shape: tuple[int, ...]
    start: tuple[int, ...]
    length: tuple[int, ...]
    order: tuple[int, ...]  # dims of the view that are neither broadcast nor of size 1, outermost block first


def _blocks(view: Geometry) -> _Blocks | None:
    """The nested blocks of a view, or None if its strides do not nest.

    Blocks that start where the data starts are tried first: their reshape is free if it fits the data's own shape.
    A view that crosses the border of such a block may still nest in blocks that start at its own first element.
    """
    found = _nest(view)
    if found is None and view.offset:
        found = _nest(view._replace(offset=0))
        found = found and found._replace(skip=view.offset)
    return found


def _nest(view: Geometry) -> _Blocks | None:
    dims = [d for d, (length, step) in enumerate(zip(view.size, view.stride, strict=True)) if length != 1 and step != 0]
    order = sorted(dims, key=lambda d: -view.stride[d])
    steps = [view.stride[d] for d in order] + [1]
    rest = view.offset
    shape, start, length = [], [], []
    for level, dim in enumerate(order):
        first, rest = divmod(rest, steps[level])
        if level and steps[level - 1] % steps[level]:
            return None
        capacity = steps[level - 1] // steps[level] if level else first + view.size[dim]
        if first + view.size[dim] > capacity:
            return None  # it reaches into the next block: overlapping or wrapped around
        shape.append(capacity)
        start.append(first)
        length.append(view.size[dim])
    if not order:
        return _Blocks(0, rest + 1, (rest + 1,), (rest,), (1,), ())
    shape.append(steps[-2])  # the innermost block, of which the view takes one element
    start.append(rest)
    length.append(1)
    return _Blocks(0, math.prod(shape), tuple(shape), tuple(start), tuple(length), tuple(order))


def _indices(view: Geometry) -> np.ndarray:
    """Positions in the flat data of all elements of the view, with the view's shape."""
    positions = np.full(view.size, view.offset, np.int64)
    for dim, (length, step) in enumerate(zip(view.size, view.stride, strict=True)):
        shape = [1] * len(view.size)
        shape[dim] = length
        positions = positions + (np.arange(length, dtype=np.int64) * step).reshape(shape)
    return positions


def _as_blocks(flat: jax.Array, blocks: _Blocks) -> jax.Array:
    """The elements of `flat` that the blocks cover, with zeros where it is too short, in the shape of the blocks."""
    end = min(flat.size, blocks.skip + blocks.needed)
    if blocks.skip or end < flat.size:
        flat = jax.lax.slice(flat, (blocks.skip,), (end,))
    if flat.size < blocks.needed:
        flat = jax.lax.pad(flat, jnp.zeros((), flat.dtype), [(0, blocks.needed - flat.size, 0)])
    return flat.reshape(blocks.shape)


def read(data: jax.Array, view: Geometry) -> jax.Array:
    """The elements of `data` (any shape, taken as flat) that the view shows, as an array of shape `view.size`."""
    if math.prod(view.size) == 0:
        return jnp.zeros(view.size, data.dtype)
    if view.offset == 0 and math.prod(view.size) == data.size and is_contiguous(view.size, view.stride):
        return data.reshape(view.size)
    blocks = _blocks(view)
    if blocks is None:
        return data.reshape(-1)[jnp.asarray(_indices(view))]
    array = _as_blocks(data.reshape(-1), blocks)
    limits = tuple(first + length for first, length in zip(blocks.start, blocks.length, strict=True))
    array = jax.lax.slice(array, blocks.start, limits).reshape([view.size[d] for d in blocks.order])
    places = sorted(range(len(blocks.order)), key=lambda i: blocks.order[i])
    kept = [blocks.order[i] for i in places]
    if places == [1, 0] and array.size >= _LARGE:
        # A large transposed matrix goes to a product, as do other views of the same data (a gradient's for weight and
        # input). On the CPU, what computes the data would be computed again for the transposed one.
        array = materialized(array)
    return jax.lax.broadcast_in_dim(array.transpose(places), view.size, kept)


def write(data: jax.Array, value: jax.Array, view: Geometry) -> jax.Array:
    """`data` with the elements that the view shows replaced by `value` (shape `view.size`); keeps the shape of `data`.

    Where the view shows an element more than once, any one of its values is kept, as in torch.
    """
    if math.prod(view.size) == 0:
        return data
    if view.offset == 0 and math.prod(view.size) == data.size and is_contiguous(view.size, view.stride):
        return value.reshape(data.shape)
    # a broadcast dim shows one element several times: the first stands for all
    for dim, step in enumerate(view.stride):
        if step == 0 and view.size[dim] > 1:
            value = jax.lax.slice_in_dim(value, 0, 1, axis=dim)
    size = tuple(1 if step == 0 else length for length, step in zip(view.size, view.stride, strict=True))
    view = Geometry(size, view.stride, view.offset)
    blocks = _blocks(view)
    flat: Any = data.reshape(-1)
    if blocks is None:
        return flat.at[jnp.asarray(_indices(view))].set(value).reshape(data.shape)
    others = [d for d in range(len(size)) if d not in blocks.order]
    update = value.transpose([*blocks.order, *others]).reshape(blocks.length)
    array = jax.lax.dynamic_update_slice(_as_blocks(flat, blocks), update, blocks.start).reshape(-1)
    end = min(flat.size, blocks.skip + blocks.needed)
    if array.size > end - blocks.skip:
        array = jax.lax.slice(array, (0,), (end - blocks.skip,))
    if array.size < flat.size:
        array = jax.lax.dynamic_update_slice(flat, array, (blocks.skip,))
    return array.reshape(data.shape)
