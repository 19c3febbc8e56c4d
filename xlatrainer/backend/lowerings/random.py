"""Random numbers, element by element, and dropout. `key` is a JAX key of the call's own; see `program` for where it
comes from. What is drawn by rejection or by comparing elements with one another is in `sampling`.

Half types are drawn in float32 and rounded, except uniform numbers, which rounding would take to their excluded bound.
"""

import jax
import jax.numpy as jnp
import numpy as np

from xlatrainer.backend.dtypes import compute_dtype, from_numpy, to_numpy
from xlatrainer.backend.lowerings.checks import holds
from xlatrainer.backend.lowerings.registry import Number, lowering


def _floating(dtype):
    """The dtype to draw in."""
    return compute_dtype(from_numpy(dtype))


def _is_complex(dtype):
    return jnp.issubdtype(dtype, jnp.complexfloating)


def _random_bits(key, shape, dtype):
    """Random unsigned numbers of as many bits as a number of the floating `dtype` holds digits, and how many."""
    digits = jnp.finfo(dtype).nmant + 1
    width = np.uint64 if digits > 32 else np.uint32
    return jax.random.bits(key, shape, width) >> width(np.dtype(width).itemsize * 8 - digits), digits


def _unit(key, shape, dtype):
    """Uniform in [0, 1), in steps that `dtype` holds exactly."""
    bits, digits = _random_bits(key, shape, dtype)
    return bits.astype(dtype) * jnp.asarray(2.0**-digits, dtype)


def open_unit(key, shape, dtype):
    """Uniform in (0, 1), both bounds excluded: what a logarithm is taken of. `dtype` is float32 or float64."""
    bits, digits = _random_bits(key, shape, dtype)
    half_step = jnp.asarray(2.0**-digits, dtype)
    return ((bits >> 1).astype(dtype) * 2 + 1) * half_step


# dropout and bernoulli


def _keep_mask(key, probability, shape):
    """True with `probability`, a 0-dim float64 array, decided on 32 random bits each."""
    limit = jnp.clip(probability * 2.0**32, 0, 2.0**32 - 1).astype(jnp.uint32)
    return (jax.random.bits(key, shape, jnp.uint32) < limit) | (probability >= 1)


def _array(number):
    return number.array if isinstance(number, Number) else jnp.asarray(number)


@lowering("native_dropout", random=True, takes_specs=True)
def native_dropout(input, p, train, *, key, out_specs):
    if not train:
        return input, jnp.ones(input.shape, jnp.bool_)
    kept = 1 - _array(p).astype(jnp.float64)
    mask = _keep_mask(key, kept, input.shape)
    scale = jnp.where(kept > 0, 1 / kept, 0).astype(_floating(input.dtype))
    return jnp.where(mask, input * scale, 0).astype(input.dtype), mask


@lowering("native_dropout_backward", takes_specs=True)
def native_dropout_backward(grad_output, mask, scale, *, out_specs):
    grad = grad_output.astype(to_numpy(out_specs[0].dtype))
    return jnp.where(mask, grad * _array(scale).astype(grad.dtype), 0)


def _bernoulli(key, probability, shape, dtype):
    holds(
        (probability >= 0) & (probability <= 1),
        RuntimeError,
        "Expected p_in >= 0 && p_in <= 1 to be true, but got false.",
    )
    return (_unit(key, shape, _floating(probability.dtype)) < probability).astype(dtype)


@lowering("bernoulli", random=True)
def bernoulli(self, *, generator=None, key):
    return _bernoulli(key, self, self.shape, self.dtype)


@lowering("bernoulli.p", random=True, takes_specs=True)
def bernoulli_p(self, p=0.5, *, generator=None, key, out_specs):
    return _keep_mask(key, _array(p).astype(jnp.float64), self.shape).astype(self.dtype)


@lowering("bernoulli.Tensor", random=True)
def bernoulli_tensor(self, p, *, generator=None, key):
    return _bernoulli(key, p, self.shape, self.dtype)


# continuous distributions


@lowering("uniform", random=True)
def uniform(self, from_=0.0, to=1.0, *, generator=None, key):
    """In [from, to): what rounds to the excluded bound becomes the included one."""
    if _is_complex(self.dtype):
        part = jnp.finfo(self.dtype).dtype
        return jax.lax.complex(*(_between(k, self.shape, part, from_, to) for k in jax.random.split(key)))
    return _between(key, self.shape, self.dtype, from_, to)


def _between(key, shape, dtype, low, high):
    working = _floating(dtype)
    low, high = jnp.asarray(low).astype(working), jnp.asarray(high).astype(working)
    drawn = (low + _unit(key, shape, dtype).astype(working) * (high - low)).astype(dtype)
    return jnp.where(drawn < high.astype(dtype), drawn, low.astype(dtype))


@lowering("normal_functional", random=True)
def normal_functional(self, mean=0.0, std=1.0, *, generator=None, key):
    draws = jax.random.normal(key, self.shape, _floating(self.dtype))
    return (mean + draws * std).astype(self.dtype)


@lowering("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", random=True, takes_specs=True)
def normal_tensor(mean, std=1.0, *, generator=None, key, out_specs):
    spec = out_specs[0]
    mean, std = _array(mean), _array(std)
    holds(std >= 0, RuntimeError, "normal expects all elements of std >= 0.0")
    draws = jax.random.normal(key, spec.shape, compute_dtype(spec.dtype))
    return (mean.astype(draws.dtype) + draws * std.astype(draws.dtype)).astype(to_numpy(spec.dtype))


@lowering("log_normal", random=True)
def log_normal(self, mean=1.0, std=2.0, *, generator=None, key):
    draws = jax.random.normal(key, self.shape, _floating(self.dtype))
    return jnp.exp(mean + draws * std).astype(self.dtype)


@lowering("exponential", random=True)
def exponential(self, lambd=1.0, *, generator=None, key):
    """Never 0: samples are divided by."""
    dtype = _floating(self.dtype)
    return (-jnp.log(open_unit(key, self.shape, dtype)) / lambd).astype(self.dtype)


@lowering("cauchy", random=True)
def cauchy(self, median=0.0, sigma=1.0, *, generator=None, key):
    draws = open_unit(key, self.shape, _floating(self.dtype))
    return (median + sigma * jnp.tan(np.pi * (draws - 0.5))).astype(self.dtype)


@lowering("geometric", random=True)
def geometric(self, p, *, generator=None, key):
    """The number of trials until the first success, 1 at the least."""
    dtype = _floating(self.dtype) if jnp.issubdtype(self.dtype, jnp.floating) else jnp.float64
    p = jnp.asarray(p).astype(dtype)
    trials = jnp.ceil(jnp.log(open_unit(key, self.shape, dtype)) / jnp.log1p(-p))
    return jnp.maximum(trials, 1).astype(self.dtype)


@lowering("rrelu_with_noise_functional", random=True)
def rrelu_with_noise(self, noise, lower=0.125, upper=1 / 3, training=False, generator=None, *, key):
    """Negative elements are multiplied by `noise`, drawn when training."""
    if not training:
        slope = (jnp.asarray(lower) + upper) / 2
        return jnp.where(self <= 0, self * slope, self).astype(self.dtype), noise
    drawn = lower + _unit(key, self.shape, _floating(self.dtype)) * (jnp.asarray(upper) - lower)
    noise = jnp.where(self <= 0, drawn, 1)
    return (self * noise).astype(self.dtype), noise.astype(self.dtype)


# whole numbers


@lowering("randperm", random=True, takes_specs=True)
def randperm(n, *, dtype=None, layout=None, device=None, pin_memory=None, key, out_specs):
    return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int64)).astype(to_numpy(out_specs[0].dtype))


def _whole_numbers(key, low, count, shape, dtype):
    """`count` numbers from `low` on, each as likely as the others to within count / 2**64."""
    bits = jax.random.bits(key, shape, jnp.uint64)
    if count < 2**64:
        bits = bits % np.uint64(count)
    if dtype == jnp.bool_:
        return (bits + np.uint64(low)) != 0
    return (bits + np.uint64(low % 2**64)).astype(jnp.uint64 if dtype == jnp.uint64 else jnp.int64).astype(dtype)


def _largest(dtype):
    """The largest number of the whole ones that `dtype` holds without a gap."""
    if dtype == jnp.bool_:
        return 1
    if jnp.issubdtype(dtype, jnp.floating):
        return 2 ** (jnp.finfo(dtype).nmant + 1)
    return int(jnp.iinfo(dtype).max)


@lowering("random.from", random=True)
def random_from(self, from_, to, *, generator=None, key):
    high = to if to is not None else _largest(self.dtype) + 1
    return _whole_numbers(key, from_, high - from_, self.shape, self.dtype)


@lowering("random.to", random=True)
def random_to(self, to, *, generator=None, key):
    return _whole_numbers(key, 0, to, self.shape, self.dtype)


@lowering("random", random=True)
def random(self, *, generator=None, key):
    """Whole numbers from 0 up to the largest that the dtype holds exactly, as torch draws them."""
    return _whole_numbers(key, 0, _largest(self.dtype) + 1, self.shape, self.dtype)
