"""Tensors made from numbers alone. Shape and dtype come from `out_specs`: torch's own rules for a missing dtype."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.dtypes import compute_dtype, to_numpy
from xlatrainer.backend.lowerings.registry import Number, lowering


def _array(number):
    return number.array if isinstance(number, Number) else jnp.asarray(number)


@lowering("fill.Scalar", "fill.Tensor")
def fill(self, value):
    return jnp.broadcast_to(jnp.asarray(value).astype(self.dtype), self.shape)


@lowering("zero")
def zero(self):
    return jnp.zeros_like(self)


@lowering("_efficientzerotensor", takes_specs=True)
def efficientzerotensor(size, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs):
    """A gradient that is known to be zero; nothing need be stored for it here either."""
    return jnp.zeros(size, to_numpy(out_specs[0].dtype))


@lowering("scalar_tensor", takes_specs=True)
def scalar_tensor(s, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs):
    return _array(s).astype(to_numpy(out_specs[0].dtype))


def _range(start, step, spec):
    """`start + i * step`, with integers in int64 and floats in float64 until the end."""
    (length,) = spec.shape
    dtype = jnp.float64 if spec.dtype.is_floating_point else jnp.int64
    steps = jnp.arange(length, dtype=dtype)
    return (jnp.asarray(start, dtype) + steps * jnp.asarray(step, dtype)).astype(to_numpy(spec.dtype))


@lowering("arange", static=("end",), takes_specs=True)
def arange(end, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs):
    return _range(0, 1, out_specs[0])


@lowering("arange.start", "arange.start_step", static=("start", "end", "step"), takes_specs=True)
def arange_start_step(start, end, step=1, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs):
    return _range(start, step, out_specs[0])


def _linspace(start, end, steps, dtype):
    """From both ends towards the middle, as torch computes it, so that the last element is `end`."""
    start, end = (_array(number).astype(dtype) for number in (start, end))
    index = jnp.arange(steps, dtype=dtype)
    step = (end - start) / max(steps - 1, 1)
    return jnp.where(index < steps // 2, start + step * index, end - step * (steps - 1 - index))


def _working_dtype(dtype):
    return to_numpy(dtype) if dtype.is_complex else jnp.float64


@lowering("linspace", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor", takes_specs=True)
def linspace(start, end, steps, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs):
    out = out_specs[0].dtype
    if steps == 1:
        return _array(start).astype(to_numpy(out)).reshape(1)
    return _linspace(start, end, steps, _working_dtype(out)).astype(to_numpy(out))


@lowering(
    "logspace",
    "logspace.Tensor_Tensor",
    "logspace.Tensor_Scalar",
    "logspace.Scalar_Tensor",
    static=("base",),
    takes_specs=True,
)
def logspace(start, end, steps, base=10.0, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs):
    out = out_specs[0].dtype
    exponents = _linspace(start, start if steps == 1 else end, steps, _working_dtype(out))
    return jnp.power(jnp.asarray(base, exponents.dtype), exponents).astype(to_numpy(out))


@lowering("eye", "eye.m", takes_specs=True)
def eye(n, m=None, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs):
    return jnp.eye(n, m, dtype=to_numpy(out_specs[0].dtype))


@lowering("tril")
def tril(self, diagonal=0):
    return jnp.tril(self, diagonal)


@lowering("triu")
def triu(self, diagonal=0):
    return jnp.triu(self, diagonal)


@lowering("tril_indices", takes_specs=True)
def tril_indices(row, col, offset=0, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs):
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)), to_numpy(out_specs[0].dtype))


@lowering("triu_indices", takes_specs=True)
def triu_indices(row, col, offset=0, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs):
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)), to_numpy(out_specs[0].dtype))


@lowering("complex")
def complex(real, imag):
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering("polar")
def polar(abs, angle):
    return complex(abs * jnp.cos(angle), abs * jnp.sin(angle))


@lowering("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta", takes_specs=True)
def kaiser_window(
    window_length, periodic=True, beta=12.0, *, dtype=None, layout=None, device=None, pin_memory=None, out_specs
):
    """torch's own is made for the CPU and CUDA alone."""
    target = to_numpy(out_specs[0].dtype)
    if window_length <= 1:
        return jnp.ones(window_length, target)
    working = compute_dtype(out_specs[0].dtype)
    beta = (beta.array if isinstance(beta, Number) else jnp.asarray(beta)).astype(working)
    last = window_length if periodic else window_length - 1
    place = 2 * jnp.arange(window_length, dtype=working) / last - 1
    return (jnp.i0(beta * jnp.sqrt(jnp.maximum(1 - place * place, 0))) / jnp.i0(beta)).astype(target)
