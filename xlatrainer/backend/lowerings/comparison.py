"""Comparisons, logic, bits, selection and order: what torch's reference lists under "Comparison ops" and beside it.

NaN as in torch: `maximum` and `clamp` hand it on, `fmax` passes it over, and order takes it as the greatest of all.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.dtypes import to_numpy
from xlatrainer.backend.lowerings.checks import index_in_range
from xlatrainer.backend.lowerings.registry import Number, lowering, pointwise


def _is_bool(array):
    return jnp.result_type(array) == jnp.bool_


def _is_floating(array):
    return jnp.issubdtype(jnp.result_type(array), jnp.floating)


# comparisons and logic

_COMPARISONS = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}
for _name, _function in _COMPARISONS.items():
    pointwise(f"{_name}.Tensor", f"{_name}.Scalar")(_function)

_LOGICAL: dict[str, Callable[..., Any]] = {
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "logical_not": jnp.logical_not,
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
}
for _name, _logical in _LOGICAL.items():
    pointwise(_name)(_logical)


@pointwise("isposinf")
def isposinf(self):
    return self == jnp.inf if _is_floating(self) else jnp.zeros_like(self, jnp.bool_)


@pointwise("isneginf")
def isneginf(self):
    return self == -jnp.inf if _is_floating(self) else jnp.zeros_like(self, jnp.bool_)


@pointwise("signbit")
def signbit(self):
    return jnp.signbit(self) if _is_floating(self) else self < 0


# bits

for _name, _function in {"and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor}.items():
    pointwise(f"bitwise_{_name}.Tensor", f"bitwise_{_name}.Scalar", f"bitwise_{_name}.Scalar_Tensor")(_function)

pointwise("bitwise_not")(jnp.bitwise_not)


@pointwise(
    "bitwise_left_shift.Tensor",
    "bitwise_left_shift.Tensor_Scalar",
    "bitwise_left_shift.Scalar_Tensor",
    "__lshift__.Tensor",
    "__lshift__.Scalar",
)
def bitwise_left_shift(self, other):
    if _is_floating(self):
        return self * jnp.exp2(other)
    return lax.shift_left(*jnp.broadcast_arrays(self, other))


@pointwise(
    "bitwise_right_shift.Tensor",
    "bitwise_right_shift.Tensor_Scalar",
    "bitwise_right_shift.Scalar_Tensor",
    "__rshift__.Tensor",
    "__rshift__.Scalar",
)
def bitwise_right_shift(self, other):
    """Shifts by a negative amount or by the width and more leave only the sign, as torch defines it."""
    if _is_floating(self):
        return self / jnp.exp2(other)
    self, other = jnp.broadcast_arrays(self, other)
    if jnp.issubdtype(self.dtype, jnp.unsignedinteger):
        return lax.shift_right_logical(self, other)
    return lax.shift_right_arithmetic(self, other)


# extremes and choice

pointwise("maximum")(jnp.maximum)
pointwise("minimum")(jnp.minimum)
pointwise("fmax")(jnp.fmax)
pointwise("fmin")(jnp.fmin)


@pointwise("clamp", "clamp.Tensor")
def clamp(self, min=None, max=None):
    self = self if min is None else jnp.maximum(self, min)
    return self if max is None else jnp.minimum(self, max)


@pointwise("clamp_min", "clamp_min.Tensor")
def clamp_min(self, min):
    return jnp.maximum(self, min)


@pointwise("clamp_max", "clamp_max.Tensor")
def clamp_max(self, max):
    return jnp.minimum(self, max)


@lowering("where.self", takes_specs=True)
def where_self(condition, self, other, *, out_specs):
    dtype = to_numpy(out_specs[0].dtype)
    self, other = (x.array if isinstance(x, Number) else x for x in (self, other))
    return jnp.where(condition, jnp.asarray(self).astype(dtype), jnp.asarray(other).astype(dtype))


@pointwise("sign")
def sign(self):
    """NaN has the sign 0, as in torch."""
    if _is_bool(self):
        return self
    return jnp.where(jnp.isnan(self), 0, jnp.sign(self)) if _is_floating(self) else jnp.sign(self)


@pointwise("sgn")
def sgn(self):
    return jnp.sign(self) if jnp.iscomplexobj(self) else sign(self)


@pointwise("heaviside")
def heaviside(self, values):
    return jnp.where(self == 0, values, jnp.where(self > 0, 1, 0).astype(self.dtype))


@pointwise("nextafter")
def nextafter(self, other):
    return jnp.nextafter(self, other)


@pointwise("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor")
def isin(elements, test_elements, assume_unique=False, invert=False):
    return jnp.isin(elements, test_elements, invert=invert)


# order


def sorted_with_indices(array, dim, descending=False):
    """Values and int64 indices in stable order along `dim`; NaN counts as the greatest."""
    if not array.ndim:
        return array, jnp.zeros((), jnp.int64)
    dim %= array.ndim
    indices = lax.broadcasted_iota(jnp.int64, array.shape, dim)
    keys = array.astype(jnp.uint8) if _is_bool(array) else array
    operands = [keys, indices]
    if descending:  # turned over before and after, so that equal elements keep their order
        operands = [lax.rev(operand, (dim,)) for operand in operands]
    operands = lax.sort(operands, dimension=dim, num_keys=1, is_stable=True)
    if descending:
        operands = [lax.rev(operand, (dim,)) for operand in operands]
    return operands[0].astype(array.dtype), operands[1]


@lowering("sort", "sort.stable")
def sort(self, dim=-1, descending=False, *, stable=None):
    return sorted_with_indices(self, dim, descending)


@lowering("topk")
def topk(self, k, dim=-1, largest=True, sorted=True):
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    if largest and self.dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        values, indices = lax.top_k(jnp.moveaxis(self, dim, -1), k)
        return jnp.moveaxis(values, -1, dim), jnp.moveaxis(indices, -1, dim).astype(jnp.int64)
    values, indices = sorted_with_indices(self, dim, descending=largest)
    return lax.slice_in_dim(values, 0, k, axis=dim), lax.slice_in_dim(indices, 0, k, axis=dim)


@lowering("kthvalue")
def kthvalue(self, k, dim=-1, keepdim=False):
    values, indices = sorted_with_indices(self, dim)
    if not self.ndim:
        return values, indices
    take = lax.index_in_dim
    return take(values, k - 1, dim, keepdim), take(indices, k - 1, dim, keepdim)


def _median_position(ordered, dim, ignore_nan):
    """Where the lower median lies: behind the NaNs, which torch lets win, or among the other elements."""
    size = ordered.shape[dim]
    if not _is_floating(ordered):
        return jnp.full((1,) * ordered.ndim, (size - 1) // 2)
    nans = jnp.sum(jnp.isnan(ordered), axis=dim, keepdims=True)
    if ignore_nan:
        return jnp.maximum(size - nans - 1, 0) // 2
    return jnp.where(nans > 0, size - nans, (size - 1) // 2)


def _median(self, dim, keepdim, ignore_nan):
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    values, indices = sorted_with_indices(self, dim)
    shape = tuple(1 if d == dim % self.ndim else n for d, n in enumerate(self.shape))
    position = jnp.broadcast_to(_median_position(values, dim, ignore_nan), shape)
    picked = [jnp.take_along_axis(array, position, axis=dim) for array in (values, indices)]
    return tuple(picked if keepdim else (jnp.squeeze(array, dim) for array in picked))


@lowering("median.dim")
def median_dim(self, dim, keepdim=False):
    return _median(self, dim, keepdim, ignore_nan=False)


@lowering("nanmedian.dim")
def nanmedian_dim(self, dim, keepdim=False):
    return _median(self, dim, keepdim, ignore_nan=True)


@lowering("median")
def median(self):
    return _flat_median(self, ignore_nan=False)


@lowering("nanmedian")
def nanmedian(self):
    return _flat_median(self, ignore_nan=True)


def _flat_median(self, ignore_nan):
    if not self.size:
        return jnp.full((), jnp.nan if _is_floating(self) else jnp.iinfo(self.dtype).min, self.dtype)
    return _median(self.reshape(-1), 0, False, ignore_nan)[0]


@lowering("searchsorted.Tensor", takes_specs=True)
def searchsorted_tensor(sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None, out_specs):
    sorted_sequence = _in_order(sorted_sequence, sorter)
    return _searchsorted(sorted_sequence, self, right or side == "right", out_specs[0])


@lowering("searchsorted.Scalar", takes_specs=True)
def searchsorted_scalar(sorted_sequence, self, *, out_int32=False, right=False, side=None, sorter=None, out_specs):
    sorted_sequence = _in_order(sorted_sequence, sorter)
    value = self.array if isinstance(self, Number) else jnp.asarray(self)
    return _searchsorted(sorted_sequence, value, right or side == "right", out_specs[0])


@lowering("bucketize.Tensor", takes_specs=True)
def bucketize_tensor(self, boundaries, *, out_int32=False, right=False, out_specs):
    return _searchsorted(boundaries, self, right, out_specs[0])


@lowering("bucketize.Scalar", takes_specs=True)
def bucketize_scalar(self, boundaries, *, out_int32=False, right=False, out_specs):
    value = self.array if isinstance(self, Number) else jnp.asarray(self)
    return _searchsorted(boundaries, value, right, out_specs[0])


def _in_order(sequence, sorter):
    if sorter is None:
        return sequence
    index_in_range(sorter, sequence.shape[-1], RuntimeError, "torch.searchsorted(): sorter index {value} out of range")
    return jnp.take_along_axis(sequence, sorter, axis=-1)


def _searchsorted(sequence, values, right, out):
    side = "right" if right else "left"
    dtype = to_numpy(out.dtype)
    if sequence.ndim <= 1:
        return jnp.searchsorted(sequence.reshape(-1), values, side=side).astype(dtype).reshape(out.shape)
    search = jax.vmap(lambda row, wanted: jnp.searchsorted(row, wanted, side=side))
    rows, wanted = sequence.reshape(-1, sequence.shape[-1]), values.reshape(-1, values.shape[-1])
    return search(rows, wanted).astype(dtype).reshape(out.shape)
