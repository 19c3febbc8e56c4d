"""Reductions and scans.

The dtype of a result is torch's (`out_specs`): a sum of integers is int64, `any` of uint8 is uint8. Half types are
summed in float32 and rounded once, as torch's CPU kernels do. An empty or missing `dim` means all dims.
"""

import math
from functools import partial
from string import ascii_lowercase

import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.dtypes import compute_dtype, to_numpy
from xlatrainer.backend.lowerings import leading_axes
from xlatrainer.backend.lowerings.partitioning import partitioned
from xlatrainer.backend.lowerings.pointwise import complex_logaddexp
from xlatrainer.backend.lowerings.registry import lowering


def _axes(dim, ndim):
    """The dims as non-negative axes; torch lets a 0-dim tensor be reduced along dim 0."""
    if dim is None or dim == [] or not ndim:
        return tuple(range(ndim))
    return tuple(d % ndim for d in (dim if isinstance(dim, list | tuple) else [dim]))


def _is_floating(array):
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _working(self, spec):
    """The operand in the dtype to compute a result of this spec in."""
    dtype = compute_dtype(spec.dtype)
    if dtype == jnp.bool_ and self.dtype != jnp.bool_:
        return self != 0
    if jnp.iscomplexobj(self) and not spec.dtype.is_complex:
        return self
    return self.astype(dtype)


# sums and means


def _sum(array, axes, keepdims):
    """A sum. Where it is one over the rows of a batch, it is the gradient of something added to each of them."""
    whole = partial(leading_axes.total, axes=axes, keepdims=keepdims)
    if 0 not in axes or len(axes) == array.ndim:
        return whole(array)
    letters = ascii_lowercase[: array.ndim]
    ones = iter(ascii_lowercase[array.ndim :])
    result = "".join(
        next(ones) if i in axes else letter for i, letter in enumerate(letters) if keepdims or i not in axes
    )
    return partitioned(whole, f"{letters}->{result}", letters, array)


@lowering("sum", "sum.dim_IntList", takes_specs=True)
def sum_dim(self, dim=None, keepdim=False, *, dtype=None, out_specs):
    total = _sum(_working(self, out_specs[0]), _axes(dim, self.ndim), keepdim)
    return total.astype(to_numpy(out_specs[0].dtype))


@lowering("nansum", takes_specs=True)
def nansum(self, dim=None, keepdim=False, *, dtype=None, out_specs):
    total = jnp.nansum(_working(self, out_specs[0]), _axes(dim, self.ndim), keepdims=keepdim)
    return total.astype(to_numpy(out_specs[0].dtype))


@lowering("mean", "mean.dim", takes_specs=True)
def mean_dim(self, dim=None, keepdim=False, *, dtype=None, out_specs):
    axes = _axes(dim, self.ndim)
    count = math.prod(self.shape[axis] for axis in axes)
    total = leading_axes.total(_working(self, out_specs[0]), axes, keepdim)
    mean = total / count if count else jnp.full_like(total, jnp.nan)
    return mean.astype(to_numpy(out_specs[0].dtype))


@lowering("prod", "prod.dim_int", takes_specs=True)
def prod(self, dim=None, keepdim=False, *, dtype=None, out_specs):
    product = jnp.prod(_working(self, out_specs[0]), _axes(dim, self.ndim), keepdims=keepdim)
    return product.astype(to_numpy(out_specs[0].dtype))


@lowering("count_nonzero", "count_nonzero.dim_IntList")
def count_nonzero(self, dim=None):
    return jnp.sum(self != 0, _axes(dim, self.ndim), dtype=jnp.int64)


@lowering("trace", takes_specs=True)
def trace(self, *, out_specs):
    return jnp.trace(_working(self, out_specs[0])).astype(to_numpy(out_specs[0].dtype))


# any and all


@lowering("any", "any.dim", "any.dims", takes_specs=True)
def any(self, dim=None, keepdim=False, *, out_specs):
    return _truth(jnp.any, self, dim, keepdim, out_specs)


@lowering("all", "all.dim", "all.dims", takes_specs=True)
def all(self, dim=None, keepdim=False, *, out_specs):
    return _truth(jnp.all, self, dim, keepdim, out_specs)


def _truth(function, self, dim, keepdim, out_specs):
    """With `dim=[]`, unlike other reductions, nothing is reduced."""
    axes = () if dim == [] else _axes(dim, self.ndim)
    return function(self != 0, axes, keepdims=keepdim).astype(to_numpy(out_specs[0].dtype))


# extremes


@lowering("amax")
def amax(self, dim=None, keepdim=False):
    return leading_axes.maximum(self, _axes(dim, self.ndim), keepdim)


@lowering("amin")
def amin(self, dim=None, keepdim=False):
    return leading_axes.minimum(self, _axes(dim, self.ndim), keepdim)


@lowering("aminmax")
def aminmax(self, *, dim=None, keepdim=False):
    axes = _axes(dim, self.ndim)
    return leading_axes.minimum(self, axes, keepdim), leading_axes.maximum(self, axes, keepdim)


@lowering("_aminmax")
def aminmax_whole(self):
    return jnp.min(self), jnp.max(self)


@lowering("_aminmax.dim")
def aminmax_dim(self, dim, keepdim=False):
    return aminmax(self, dim=dim, keepdim=keepdim)


@lowering("max")
def max(self):
    return jnp.max(self)


@lowering("min")
def min(self):
    return jnp.min(self)


@lowering("max.dim")
def max_dim(self, dim, keepdim=False):
    return _extreme_with_index(jnp.max, jnp.argmax, self, dim, keepdim)


@lowering("min.dim")
def min_dim(self, dim, keepdim=False):
    return _extreme_with_index(jnp.min, jnp.argmin, self, dim, keepdim)


def _extreme_with_index(extreme, arg_extreme, self, dim, keepdim):
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    return extreme(self, dim, keepdims=keepdim), arg_extreme(self, dim, keepdims=keepdim).astype(jnp.int64)


@lowering("argmax", takes_specs=True)
def argmax(self, dim=None, keepdim=False, *, out_specs):
    return _arg_extreme(jnp.argmax, self, dim, out_specs)


@lowering("argmin", takes_specs=True)
def argmin(self, dim=None, keepdim=False, *, out_specs):
    return _arg_extreme(jnp.argmin, self, dim, out_specs)


def _arg_extreme(function, self, dim, out_specs):
    array = self if self.ndim and dim is not None else self.reshape(-1)
    return function(array, dim if self.ndim else None).astype(jnp.int64).reshape(out_specs[0].shape)


@lowering("hash_tensor", static=("mode",))
def hash_tensor(self, dim=(), *, keepdim=False, mode=0):
    """The `xor` of the elements' bits; floats count as float64, for others the value itself is what counts."""
    if _is_floating(self):
        bits = lax.bitcast_convert_type(self.astype(jnp.float64), jnp.uint64)
    else:
        bits = self.astype(jnp.uint64)
    axes = _axes(list(dim), self.ndim)
    result = lax.reduce(bits, np.uint64(0), lax.bitwise_xor, axes)
    return jnp.expand_dims(result, axes) if keepdim else result


# spread and norms


def _variance(self, dim, correction, keepdim):
    """Variance and mean in two passes; NaN or infinity where fewer elements than `correction` allows."""
    axes = _axes(dim, self.ndim)
    count = math.prod(self.shape[axis] for axis in axes)
    array = self.astype(jnp.float32) if self.dtype in (jnp.float16, jnp.bfloat16) else self
    mean = leading_axes.total(array, axes, keepdims=True) / (count or jnp.nan)
    freedom = count - (1 if correction is None else correction)
    total = leading_axes.total(_squared(array - mean), axes, keepdim)
    variance = total / (freedom if freedom > 0 else jnp.zeros((), total.dtype))
    return variance, mean.reshape(variance.shape)


def _squared(array):
    """The squared magnitude, real for complex numbers too."""
    return jnp.real(array * jnp.conj(array)) if jnp.iscomplexobj(array) else array * array


@lowering("var.correction", static=("correction",), takes_specs=True)
def var_correction(self, dim=None, *, correction=None, keepdim=False, out_specs):
    variance, _ = _variance(self, dim, correction, keepdim)
    return variance.astype(to_numpy(out_specs[0].dtype))


@lowering("std.correction", static=("correction",), takes_specs=True)
def std_correction(self, dim=None, *, correction=None, keepdim=False, out_specs):
    variance, _ = _variance(self, dim, correction, keepdim)
    return jnp.sqrt(variance).astype(to_numpy(out_specs[0].dtype))


@lowering("var_mean.correction", static=("correction",), takes_specs=True)
def var_mean_correction(self, dim=None, *, correction=None, keepdim=False, out_specs):
    variance, mean = _variance(self, dim, correction, keepdim)
    return variance.astype(to_numpy(out_specs[0].dtype)), mean.astype(self.dtype)


@lowering("std_mean.correction", static=("correction",), takes_specs=True)
def std_mean_correction(self, dim=None, *, correction=None, keepdim=False, out_specs):
    variance, mean = _variance(self, dim, correction, keepdim)
    return jnp.sqrt(variance).astype(to_numpy(out_specs[0].dtype)), mean.astype(self.dtype)


def _powers(array, ord, axes, keepdim):
    """The sum of magnitudes to the power `ord`."""
    if ord == 0:
        return jnp.sum(array != 0, axes, keepdims=keepdim).astype(jnp.finfo(array.dtype).dtype)
    if ord == 2:
        return leading_axes.total(_squared(array), axes, keepdim)
    magnitude = jnp.abs(array)
    return leading_axes.total(magnitude if ord == 1 else magnitude**ord, axes, keepdim)


def _norm(self, ord, dim, keepdim, spec):
    array = self.astype(compute_dtype(spec.dtype)) if not jnp.iscomplexobj(self) else self
    axes = _axes(dim, self.ndim)
    if math.isinf(ord) and math.prod(self.shape[axis] for axis in axes):
        result = (jnp.max if ord > 0 else jnp.min)(jnp.abs(array), axes, keepdims=keepdim)
    elif math.isinf(ord):
        result = jnp.zeros(spec.shape, compute_dtype(spec.dtype))
    else:
        result = _powers(array, ord, axes, keepdim)
        if ord == 2:
            result = jnp.sqrt(result)
        elif ord not in (0, 1):
            result = result ** (1 / ord)
    return result.astype(to_numpy(spec.dtype))


@lowering("linalg_vector_norm", static=("ord",), takes_specs=True)
def linalg_vector_norm(self, ord=2, dim=None, keepdim=False, *, dtype=None, out_specs):
    return _norm(self, ord, dim, keepdim, out_specs[0])


@lowering("linalg__powsum", static=("ord",), takes_specs=True)
def linalg_powsum(self, ord=2, dim=None, keepdim=False, *, dtype=None, out_specs):
    spec = out_specs[0]
    array = self.astype(compute_dtype(spec.dtype)) if not jnp.iscomplexobj(self) else self
    return _powers(array, ord, _axes(dim, self.ndim), keepdim).astype(to_numpy(spec.dtype))


@lowering(
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "norm.ScalarOpt_dim_dtype",
    "norm.ScalarOpt_dtype",
    static=("p",),
    takes_specs=True,
)
def norm(self, p=2, dim=None, keepdim=False, *, dtype=None, out_specs):
    return _norm(self, 2 if p is None else p, dim, keepdim, out_specs[0])


@lowering("logsumexp", takes_specs=True)
def logsumexp(self, dim, keepdim=False, *, out_specs):
    array = _working(self, out_specs[0])
    axes = _axes(dim, self.ndim)
    if math.prod(self.shape[axis] for axis in axes):
        top = leading_axes.maximum(jnp.real(array), axes, keepdims=True)
        top = jnp.where(jnp.isfinite(top), top, 0)
        total = jnp.log(leading_axes.total(jnp.exp(array - top), axes, keepdim))
        result = total + top.reshape(total.shape)
    else:
        result = jnp.full(out_specs[0].shape, -jnp.inf, array.dtype)
    return result.astype(to_numpy(out_specs[0].dtype))


# scans


def _scan(function, self, dim, spec):
    if not self.ndim:
        return _working(self, spec).astype(to_numpy(spec.dtype))
    return function(_working(self, spec), dim % self.ndim).astype(to_numpy(spec.dtype))


@lowering("cumsum", takes_specs=True)
def cumsum(self, dim, *, dtype=None, out_specs):
    return _scan(lax.cumsum, self, dim, out_specs[0])


@lowering("cumprod", takes_specs=True)
def cumprod(self, dim, *, dtype=None, out_specs):
    return _scan(lax.cumprod, self, dim, out_specs[0])


@lowering("logcumsumexp", "_logcumsumexp", takes_specs=True)
def logcumsumexp(self, dim, *, out_specs):
    return _scan(_complex_cumlogsumexp if jnp.iscomplexobj(self) else lax.cumlogsumexp, self, dim, out_specs[0])


def _complex_cumlogsumexp(array, axis):
    """One after the other, since each sum's branch of the logarithm is near that of the one before."""
    if not array.size:
        return array
    rows = jnp.moveaxis(array, axis, 0)

    def add(total, row):
        total = complex_logaddexp(row, total)
        return total, total

    _, sums = lax.scan(add, rows[0], rows[1:])
    return jnp.moveaxis(jnp.concatenate([rows[:1], sums]), 0, axis)


@lowering("cummax")
def cummax(self, dim):
    return _running_extreme(jnp.greater_equal, self, dim)


@lowering("cummin")
def cummin(self, dim):
    return _running_extreme(jnp.less_equal, self, dim)


def _running_extreme(beats, self, dim):
    """Of equal elements the last is kept, and the last NaN once there was one, as torch does."""
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)

    def later(first, second):
        wins = beats(second[0], first[0])
        if _is_floating(self):
            wins |= jnp.isnan(second[0])
        return tuple(jnp.where(wins, s, f) for f, s in zip(first, second, strict=True))

    indices = lax.broadcasted_iota(jnp.int64, self.shape, dim % self.ndim)
    if not self.size:
        return self, indices
    return tuple(lax.associative_scan(later, (self, indices), axis=dim % self.ndim))
