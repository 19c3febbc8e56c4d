"""Operators that count elements: histograms, the most frequent element, the places of the first elements not zero."""

import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.lowerings.registry import lowering


@lowering("histc")
def histc(self, bins=100, min=0, max=0):
    """Bounds that are equal stand for those of the elements; elements outside of the bounds and NaN do not count."""
    kind = jnp.float64 if self.dtype == jnp.float64 or not jnp.issubdtype(self.dtype, jnp.floating) else jnp.float32
    values = self.reshape(-1).astype(kind)
    low, high = jnp.asarray(min).astype(kind), jnp.asarray(max).astype(kind)
    if values.size:
        same = low == high
        low, high = jnp.where(same, jnp.min(values), low), jnp.where(same, jnp.max(values), high)
    same = low == high
    low, high = jnp.where(same, low - 1, low), jnp.where(same, high + 1, high)
    places = ((values - low) * (bins / (high - low))).astype(jnp.int64)
    inside = (values >= low) & (values <= high)
    places = jnp.where(inside, jnp.minimum(places, bins - 1), bins)
    return jnp.zeros(bins, jnp.int64).at[places].add(1, mode="drop").astype(self.dtype)


@lowering("mode")
def mode(self, dim=-1, keepdim=False):
    """The smallest of the most frequent elements, and where it stands last."""
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    dim %= self.ndim
    places = lax.broadcasted_iota(jnp.int64, self.shape, dim)
    values, order = lax.sort((self, places), dimension=dim, num_keys=1, is_stable=True)
    before = jnp.roll(values, 1, dim)
    starts = lax.cummax(jnp.where((values != before) | (places == 0), places, 0), axis=dim)
    best = jnp.argmax(places - starts, dim, keepdims=True)
    results = (jnp.take_along_axis(array, best, dim) for array in (values, order))
    return tuple(result if keepdim else jnp.squeeze(result, dim) for result in results)


@lowering("nonzero_static")
def nonzero_static(self, *, size, fill_value=-1):
    places = jnp.nonzero(jnp.atleast_1d(self), size=size, fill_value=fill_value)
    return jnp.stack(places[: self.ndim] or [jnp.zeros(size)], 1)[:, : self.ndim].astype(jnp.int64)
