"""Reading and writing elements by index, and the gradients of slices.

Indices are checked by the program, see `checks`; what is out of bounds reads the nearest element and writes nothing
until the error is raised. Negative indices count from the end where torch lets them. Boolean masks select a number of
elements that depends on data: `index_put` takes one, for the other cases see `counted_kernels`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.lowerings.checks import holds, index_in_range
from xlatrainer.backend.lowerings.counting import places
from xlatrainer.backend.lowerings.registry import lowering

_OF_BOOLS = {"add": "max", "multiply": "min"}


def _check(index, size, dim, kind, *, negative=False):
    message = f"index {{value}} is out of bounds for dimension {dim} with size {size}"
    index_in_range(index, size, kind, message, negative=negative)


def _check_rows(array, dim, index, kind=IndexError, *, negative=False):
    size = array.shape[dim % array.ndim] if array.ndim else 1
    index_in_range(index, size, kind, f"index {{value}} out of range in self with size {size}", negative=negative)


def _as(number, dtype):
    return jnp.asarray(number).astype(dtype)


def _write(target, method, values):
    """Write through `array.at[...]` by `set`, `add`, `multiply`, `max` or `min`; sums of bools are their `or`."""
    dtype = target.array.dtype
    method = _OF_BOOLS.get(method, method) if dtype == jnp.bool_ else method
    return getattr(target, method)(values.astype(dtype), mode="drop")


# index and index_put


def _place(array, indices):
    """numpy's advanced index of torch's list of optional tensors."""
    for dim, index in enumerate(indices):
        if index is not None:
            _check(index, array.shape[dim], dim, IndexError, negative=True)
    return tuple(slice(None) if index is None else index for index in indices)


@lowering("index.Tensor")
def index_tensor(self, indices):
    return self.at[_place(self, indices)].get(mode="clip")


@lowering("index_put", "_index_put_impl")
def index_put(self, indices, values, accumulate=False, unsafe=False):
    for position, index in enumerate(indices):
        if index is not None and index.dtype == jnp.bool_:
            return _put_by_mask(self, index, position, jnp.asarray(values), accumulate)
    return _write(self.at[_place(self, indices)], "add" if accumulate else "set", values)


def _put_by_mask(self, mask, position, values, accumulate):
    """What `self` becomes where the mask, the only index, is true; no element needs to be counted for that.

    `values` has one entry along its dim `position` for all that the mask selects, or one for each of them.
    """
    lead, rest = self.shape[:position], self.shape[position + mask.ndim :]
    ndim = len(lead) + 1 + len(rest)
    values = values.reshape((1,) * (ndim - values.ndim) + values.shape[max(values.ndim - ndim, 0) :])
    given = values.shape[position]
    if given != 1:
        count = jnp.sum(mask, dtype=jnp.int64)
        message = f"shape mismatch: {given} values cannot be broadcast to the {{value}} elements that the mask selects"
        holds(count == given, RuntimeError, message, value=count)
    if not given or not self.size:
        return self
    flat = self.reshape(*lead, mask.size, *rest)
    if given != 1:
        values = jnp.take(values, jnp.minimum(_ranks(mask), given - 1), axis=position)
    values = values.astype(self.dtype)
    if accumulate:
        values = flat | values if self.dtype == jnp.bool_ else flat + values
    return jnp.where(mask.reshape(-1, *[1] * len(rest)), values, flat).reshape(self.shape)


# along one dim


def _at_least_1d(*arrays):
    return [array.reshape(1) if not array.ndim else array for array in arrays]


def _along(index, dim):
    """The index of every element that `gather` and `scatter` mean by `index` along `dim`."""
    grid = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim)]
    grid[dim] = index
    return tuple(grid)


@lowering("gather")
def gather(self, dim, index, *, sparse_grad=False):
    shape = index.shape
    self, index = _at_least_1d(self, index)
    if not index.size:
        return jnp.zeros(shape, self.dtype)
    dim %= index.ndim
    _check(index, self.shape[dim], dim, RuntimeError)
    cut = tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(index.shape))
    return jnp.take_along_axis(self[cut], index, axis=dim, mode="clip").reshape(shape)


def _scatter(method, self, dim, index, src):
    shape = self.shape
    self, index, src = _at_least_1d(self, index, jnp.asarray(src))
    if not index.size:
        return self.reshape(shape)
    if src.shape == (1,):
        src = jnp.broadcast_to(src.reshape((1,) * index.ndim), index.shape)
    src = src[tuple(slice(n) for n in index.shape)]
    _check(index, self.shape[dim % self.ndim], dim % self.ndim, RuntimeError)
    return _write(self.at[_along(index, dim % self.ndim)], method, src).reshape(shape)


@lowering("scatter.src", "scatter.value")
def scatter(self, dim, index, src):
    return _scatter("set", self, dim, index, src)


@lowering("scatter_add")
def scatter_add(self, dim, index, src):
    return _scatter("add", self, dim, index, src)


@lowering("scatter.reduce", "scatter.value_reduce")
def scatter_reduce(self, dim, index, src, *, reduce):
    return _scatter({"add": "add", "multiply": "multiply"}[reduce], self, dim, index, src)


def _reduced_into(write, self, reduce, include_self):
    """`self` with values reduced into it; `write(method, array, ones)` writes them, or ones for them, into `array`."""
    if not include_self:
        touched = write("set", jnp.zeros(self.shape, jnp.bool_), True)
        self = jnp.where(touched, _neutral(reduce, self.dtype), self)
    if reduce != "mean":
        return write({"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce], self, False)
    counts = write("add", jnp.full(self.shape, int(include_self), self.dtype), True)
    total = write("add", self, False)
    counts = jnp.maximum(counts, 1)
    return total / counts if jnp.issubdtype(self.dtype, jnp.inexact) else jnp.floor_divide(total, counts)


def _neutral(reduce, dtype):
    if reduce in ("sum", "mean"):
        return jnp.zeros((), dtype)
    if reduce == "prod":
        return jnp.ones((), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(reduce == "amin")
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if reduce == "amax" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if reduce == "amax" else limits.max, dtype)


@lowering("scatter_reduce.two")
def scatter_reduce_two(self, dim, index, src, reduce, *, include_self=True):
    def write(method, array, ones):
        return _scatter(method, array, dim, index, jnp.ones_like(src) if ones else src)

    return _reduced_into(write, self, reduce, include_self)


def _rows(array, dim, index):
    """Addresses the slices of `array` along `dim` that `index` names."""
    return array.at[(slice(None),) * (dim % array.ndim) + (index.reshape(-1),)]


@lowering("index_select")
def index_select(self, dim, index):
    _check_rows(self, dim, index)
    if not self.ndim:
        return self
    return _rows(self, dim, index).get(mode="clip")


@lowering("index_add")
def index_add(self, dim, index, source, *, alpha=1):
    (array,) = _at_least_1d(self)
    _check_rows(array, dim, index, RuntimeError)
    update = (source * _as(alpha, source.dtype)).astype(self.dtype)
    return _write(_rows(array, dim, index), "add", _like_rows(update, array, dim, index)).reshape(self.shape)


@lowering("index_copy")
def index_copy(self, dim, index, source):
    (array,) = _at_least_1d(self)
    _check_rows(array, dim, index)
    return _write(_rows(array, dim, index), "set", _like_rows(source, array, dim, index)).reshape(self.shape)


@lowering("index_fill.int_Scalar", "index_fill.int_Tensor")
def index_fill(self, dim, index, value):
    (array,) = _at_least_1d(self)
    _check_rows(array, dim, index, negative=True)
    return _write(_rows(array, dim, index), "set", jnp.asarray(value)).reshape(self.shape)


def _like_rows(source, array, dim, index):
    """`source` in the shape of the slices it goes to; a 0-dim source stands for a slice of one element."""
    shape = list(array.shape)
    shape[dim % array.ndim] = index.size
    return source.reshape(shape)


@lowering("index_reduce")
def index_reduce(self, dim, index, source, reduce, *, include_self=True):
    (array,) = _at_least_1d(self)
    _check_rows(array, dim, index)
    source = _like_rows(source, array, dim, index)

    def write(method, array, ones):
        return _write(_rows(array, dim, index), method, jnp.ones_like(source) if ones else source)

    return _reduced_into(write, array, reduce, include_self).reshape(self.shape)


def _check_flat(array, index):
    message = f"out of range: tried to access index {{value}} on a tensor of {array.size} elements."
    index_in_range(index, array.size, IndexError, message, negative=True)


@lowering("take")
def take(self, index):
    _check_flat(self, index)
    return self.reshape(-1).at[index].get(mode="clip")


@lowering("put")
def put(self, index, source, accumulate=False):
    _check_flat(self, index)
    target = self.reshape(-1).at[index.reshape(-1)]
    return _write(target, "add" if accumulate else "set", source.reshape(-1)).reshape(self.shape)


@lowering("repeat_interleave.Tensor")
def repeat_interleave_tensor(repeats, *, output_size=None):
    places = jnp.arange(repeats.size, dtype=repeats.dtype)
    return jnp.repeat(places, repeats, total_repeat_length=output_size)


# by mask


@lowering("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(self, mask, value):
    return jnp.where(mask, _as(value, self.dtype), self)


def _ranks(mask):
    """For each element of the flat mask how many True ones lie before it."""
    flat = mask.reshape(-1)
    return jnp.cumsum(flat.astype(jnp.int64)) - flat


@lowering("masked_scatter")
def masked_scatter(self, mask, source):
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    self, mask = jnp.broadcast_to(self, shape), jnp.broadcast_to(mask, shape)
    if not source.size:
        return self
    taken = source.reshape(-1).at[_ranks(mask)].get(mode="clip").reshape(shape)
    return jnp.where(mask, taken, self)


@lowering("masked_scatter_backward")
def masked_scatter_backward(grad_output, mask, sizes):
    mask = jnp.broadcast_to(mask, grad_output.shape)
    count = math.prod(sizes)
    places = jnp.where(mask.reshape(-1), _ranks(mask), count)
    grads = jnp.zeros(count, grad_output.dtype).at[places].set(grad_output.reshape(-1), mode="drop")
    return grads.reshape(sizes)


# slices written, and gradients of slices: all static, so that XLA pads and updates in place


def _bounds(start, end, length):
    """Python's rule for the bounds of a slice."""
    return slice(start, end).indices(length)[:2]


@lowering("select_backward")
def select_backward(grad_output, input_sizes, dim, index):
    dim %= len(input_sizes)
    index %= input_sizes[dim]
    return _padded_back(jnp.expand_dims(grad_output, dim), dim, index, 1, input_sizes[dim])


@lowering("slice_backward")
def slice_backward(grad_output, input_sizes, dim, start, end, step):
    dim %= len(input_sizes)
    start, _ = _bounds(start, end, input_sizes[dim])
    return _padded_back(grad_output, dim, start, step, input_sizes[dim])


def _padded_back(grad, dim, start, step, length):
    count = grad.shape[dim]
    if not count:
        return jnp.zeros([*grad.shape[:dim], length, *grad.shape[dim + 1 :]], grad.dtype)
    config = [(0, 0, 0)] * grad.ndim
    config[dim] = (start, length - start - (count - 1) * step - 1, step - 1)
    return lax.pad(grad, jnp.zeros((), grad.dtype), config)


@lowering("select_scatter")
def select_scatter(self, src, dim, index):
    dim %= self.ndim
    place = [slice(None)] * self.ndim
    place[dim] = index % self.shape[dim]
    return self.at[tuple(place)].set(src.astype(self.dtype))


@lowering("slice_scatter")
def slice_scatter(self, src, dim=0, start=None, end=None, step=1):
    dim %= self.ndim
    start, end = _bounds(start, end, self.shape[dim])
    place = [slice(None)] * self.ndim
    place[dim] = slice(start, end, step)
    return self.at[tuple(place)].set(src.astype(self.dtype))


def _diagonal(shape, offset, dim1, dim2):
    """Index of a diagonal; the diagonal comes first, the other dims after it."""
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    length = max(min(shape[dim1] + min(offset, 0), shape[dim2] - max(offset, 0)), 0)
    steps = np.arange(length)
    place = [slice(None)] * len(shape)
    place[dim1], place[dim2] = steps - min(offset, 0), steps + max(offset, 0)
    return tuple(place), abs(dim1 - dim2) == 1, min(dim1, dim2)


def _write_diagonal(array, src, offset, dim1, dim2):
    place, adjacent, first = _diagonal(array.shape, offset, dim1, dim2)
    return array.at[place].set(jnp.moveaxis(src, -1, first if adjacent else 0).astype(array.dtype))


@lowering("diagonal_backward")
def diagonal_backward(grad_output, input_sizes, offset, dim1, dim2):
    return _write_diagonal(jnp.zeros(input_sizes, grad_output.dtype), grad_output, offset, dim1, dim2)


@lowering("diagonal_scatter")
def diagonal_scatter(self, src, offset=0, dim1=0, dim2=1):
    return _write_diagonal(self, src, offset, dim1, dim2)


@lowering("diag_embed")
def diag_embed(self, offset=0, dim1=-2, dim2=-1):
    ndim = self.ndim + 1
    dim1, dim2 = dim1 % ndim, dim2 % ndim
    length = self.shape[-1] + abs(offset)
    sizes = list(self.shape[:-1])
    for dim in sorted((dim1, dim2)):
        sizes.insert(dim, length)
    return _write_diagonal(jnp.zeros(sizes, self.dtype), self, offset, dim1, dim2)


@lowering("unfold_backward")
def unfold_backward(grad_in, input_sizes, dim, size, step):
    """Adds overlapping windows up: the transpose of reading them."""
    dim %= max(len(input_sizes), 1)
    if not input_sizes:
        return grad_in.reshape(())
    windows = np.arange(grad_in.shape[dim])[:, None] * step + np.arange(size)
    shape = jax.ShapeDtypeStruct(tuple(input_sizes), grad_in.dtype)

    def unfold(array):
        return jnp.moveaxis(jnp.take(array, windows, axis=dim), dim + 1, -1)

    return jax.linear_transpose(unfold, shape)(grad_in)


@lowering("nonzero_static", static=("size", "fill_value"))
def nonzero_static(self, *, size, fill_value=-1):
    """The places of the first `size` elements that are not 0, filled up where there are fewer."""
    return places(self, size, fill_value)[0]
