"""Discrete Fourier transforms.

`normalization` is torch's number: 0 none, 1 by the root of the length, 2 by the length.
"""

import math

import jax.numpy as jnp

from xlatrainer.backend.lowerings.registry import lowering

_BY_ROOT, _BY_LENGTH = 1, 2


def _normalized(array, lengths, normalization):
    """`array`, which is not normalized yet, of a transform over these lengths."""
    count = math.prod(lengths)
    factor = {_BY_ROOT: 1 / math.sqrt(count), _BY_LENGTH: 1 / count}.get(normalization)
    return array if factor is None else array * jnp.asarray(factor, jnp.finfo(array.dtype).dtype)


def _lengths(array, dim):
    return [array.shape[d] for d in dim]


@lowering("_fft_r2c")
def fft_r2c(self, dim, normalization, onesided):
    transform = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return _normalized(transform(self, axes=tuple(dim)), _lengths(self, dim), normalization)


@lowering("_fft_c2c")
def fft_c2c(self, dim, normalization, forward):
    if forward:
        transformed = jnp.fft.fftn(self, axes=tuple(dim))
    else:
        transformed = jnp.fft.ifftn(self, axes=tuple(dim), norm="forward")
    return _normalized(transformed, _lengths(self, dim), normalization)


@lowering("_fft_c2r")
def fft_c2r(self, dim, normalization, last_dim_size):
    lengths = [*_lengths(self, dim)[:-1], last_dim_size]
    transformed = jnp.fft.irfftn(self, lengths, axes=tuple(dim), norm="forward")
    return _normalized(transformed, lengths, normalization)
