"""Random numbers and dropout. `key` is a JAX key of the call's own; see `executor` for where it comes from."""

import jax
import jax.numpy as jnp

from xlatrainer.backend.dtypes import compute_dtype, from_numpy, to_numpy
from xlatrainer.backend.lowerings.registry import Number, lowering


def _floating(dtype):
    """The dtype to draw in: half types are drawn in float32 and rounded."""
    return compute_dtype(from_numpy(dtype))


def _uniform(key, shape, dtype):
    return jax.random.uniform(key, shape, _floating(dtype)).astype(dtype)


@lowering("native_dropout", random=True, static=("p",))
def native_dropout(input, p, train, *, key):
    if not train or p == 0:
        return input, jnp.ones(input.shape, jnp.bool_)
    if p == 1:
        return jnp.zeros_like(input), jnp.zeros(input.shape, jnp.bool_)
    keep = _keep_mask(key, 1 - p, input.shape)
    return jnp.where(keep, input * jnp.asarray(1 / (1 - p), input.dtype), 0), keep


def _keep_mask(key, probability, shape):
    """True with `probability`, decided on 32 random bits each."""
    limit = min(int(probability * 2**32), 2**32 - 1)
    return jax.random.bits(key, shape, jnp.uint32) < jnp.uint32(limit)


@lowering("native_dropout_backward", takes_specs=True)
def native_dropout_backward(grad_output, mask, scale, *, out_specs):
    grad = grad_output.astype(to_numpy(out_specs[0].dtype))
    factor = scale.array if isinstance(scale, Number) else jnp.asarray(scale)
    return jnp.where(mask, grad * factor.astype(grad.dtype), 0)


@lowering("bernoulli", random=True)
def bernoulli(self, *, generator=None, key):
    return (jax.random.uniform(key, self.shape) < self.astype(jnp.float32)).astype(self.dtype)


@lowering("bernoulli.p", random=True, static=("p",))
def bernoulli_p(self, p=0.5, *, generator=None, key):
    if p <= 0 or p >= 1:
        return jnp.full(self.shape, p >= 1).astype(self.dtype)
    return _keep_mask(key, p, self.shape).astype(self.dtype)


@lowering("bernoulli.Tensor", random=True)
def bernoulli_tensor(self, p, *, generator=None, key):
    return (jax.random.uniform(key, self.shape) < p.astype(jnp.float32)).astype(self.dtype)


@lowering("uniform", random=True)
def uniform(self, from_=0.0, to=1.0, *, generator=None, key):
    low, high = jnp.asarray(from_), jnp.asarray(to)
    draws = jax.random.uniform(key, self.shape, _floating(self.dtype))
    return (low + draws * (high - low)).astype(self.dtype)


@lowering("normal_functional", random=True)
def normal_functional(self, mean=0.0, std=1.0, *, generator=None, key):
    draws = jax.random.normal(key, self.shape, _floating(self.dtype))
    return (mean + draws * std).astype(self.dtype)


@lowering("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", random=True)
def normal_tensor(mean, std=1.0, *, generator=None, key):
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    dtype = mean.dtype if jnp.ndim(mean) or not jnp.ndim(std) else std.dtype
    return (mean + jax.random.normal(key, shape, _floating(dtype)) * std).astype(dtype)


@lowering("exponential", random=True)
def exponential(self, lambd=1.0, *, generator=None, key):
    return (jax.random.exponential(key, self.shape, _floating(self.dtype)) / lambd).astype(self.dtype)


@lowering("randperm", random=True, takes_specs=True)
def randperm(n, *, dtype=None, layout=None, device=None, pin_memory=None, key, out_specs):
    return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int64)).astype(to_numpy(out_specs[0].dtype))


@lowering("rrelu_with_noise_functional", random=True)
def rrelu_with_noise(self, noise, lower=0.125, upper=1 / 3, training=False, generator=None, *, key):
    """Negative elements are multiplied by `noise`, drawn when training."""
    if not training:
        slope = (jnp.asarray(lower) + upper) / 2
        return jnp.where(self <= 0, self * slope, self).astype(self.dtype), noise
    drawn = lower + _uniform(key, self.shape, _floating(self.dtype)) * (jnp.asarray(upper) - lower)
    noise = jnp.where(self <= 0, drawn, 1)
    return (self * noise).astype(self.dtype), noise.astype(self.dtype)


def _randint(key, low, high, shape, dtype):
    return jax.random.randint(key, shape, low, high, jnp.int64).astype(dtype)


@lowering("random.from", random=True, static=("from", "to"))
def random_from(self, from_, to, *, generator=None, key):
    high = to if to is not None else 2**63 - 1
    return _randint(key, from_, high, self.shape, self.dtype)


@lowering("random.to", random=True, static=("to",))
def random_to(self, to, *, generator=None, key):
    return _randint(key, 0, to, self.shape, self.dtype)


@lowering("random", random=True)
def random(self, *, generator=None, key):
    """Whole numbers from 0 up to the largest that the dtype holds exactly, as torch draws them."""
    if self.dtype == jnp.bool_:
        return jax.random.bits(key, self.shape, jnp.uint8) % 2 == 0
    if jnp.issubdtype(self.dtype, jnp.floating):
        high = 2 ** (jnp.finfo(self.dtype).nmant + 1) + 1
    else:
        high = min(int(jnp.iinfo(self.dtype).max), 2**63 - 2) + 1
    return _randint(key, 0, high, self.shape, self.dtype)
