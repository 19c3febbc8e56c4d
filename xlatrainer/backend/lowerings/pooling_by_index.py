"""Pooling whose windows have places of their own (adaptive and fractional max pooling), and its inverse, unpooling.

Every window is a row of flat positions in its plane, padded to the longest window by repeating positions, which a
maximum does not notice. Gradients and unpooling write to the positions that were chosen.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from xlatrainer.backend.lowerings.checks import index_in_range
from xlatrainer.backend.lowerings.registry import lowering


def _planes(array, rank):
    """The spatial dims as one, the others as one."""
    return array.reshape(math.prod(array.shape[:-rank]), math.prod(array.shape[-rank:]))


def _flat(places, spatial):
    """Flat positions, windows by positions, from those along each dim (leading dims, windows, positions)."""
    rank = len(places)
    flat = 0
    for dim, (along, size) in enumerate(zip(places, spatial, strict=True)):
        *lead, count, length = along.shape
        shape = [
            *lead,
            *(count if d == dim else 1 for d in range(rank)),
            *(length if d == dim else 1 for d in range(rank)),
        ]
        flat = flat * size + along.reshape(shape)
    sizes = flat.shape
    return flat.reshape(*sizes[: -2 * rank], math.prod(sizes[-2 * rank : -rank]), math.prod(sizes[-rank:]))


def _largest(values, positions, shape):
    """The largest value of each window, and its position."""
    chosen = jnp.argmax(values, -1, keepdims=True)
    best = jnp.take_along_axis(values, chosen, -1)
    index = jnp.take_along_axis(jnp.broadcast_to(positions, values.shape), chosen, -1)
    return best.reshape(shape), index.reshape(shape).astype(jnp.int64)


def _adaptive_places(size, length):
    start = np.arange(length) * size // length
    end = -(-(np.arange(length) + 1) * size // length)
    longest = int(np.max(end - start, initial=1))
    return np.minimum(start[:, None] + np.arange(longest), end[:, None] - 1)


def _even_windows(array, output_size):
    """`array[:, windows, positions]` by moving dims, where windows do not overlap: a gather costs more."""
    rank = len(output_size)
    split = [part for size, n in zip(array.shape[-rank:], output_size, strict=True) for part in (n, size // n)]
    axes = [0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2)]
    planes = math.prod(array.shape[:-rank])
    windows = array.reshape(planes, *split).transpose(axes)
    return windows.reshape(planes, math.prod(output_size), math.prod(split[1::2]))


@lowering("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(self, output_size):
    rank = len(output_size)
    spatial, shape = self.shape[-rank:], (*self.shape[:-rank], *output_size)
    if 0 in shape:
        return jnp.zeros(shape, self.dtype), jnp.zeros(shape, jnp.int64)
    positions = _flat([_adaptive_places(*dim) for dim in zip(spatial, output_size, strict=True)], spatial)
    even = all(size % length == 0 for size, length in zip(spatial, output_size, strict=True))
    values = _even_windows(self, output_size) if even else _planes(self, rank)[:, positions]
    return _largest(values, jnp.asarray(positions), shape)


def _written(shape, rank, indices, values, method):
    """Zeros of `shape`, and `values` written or added at `indices`, flat positions in each plane."""
    lead, spatial = shape[: len(shape) - rank], shape[len(shape) - rank :]
    planes, positions = math.prod(lead), math.prod(spatial)
    rows = jnp.arange(planes)[:, None]
    target = jnp.zeros((planes, positions), values.dtype).at[rows, _planes(indices, rank)]
    return getattr(target, method)(_planes(values, rank), mode="drop").reshape(shape)


@lowering("adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(grad_output, self, indices):
    return _written(self.shape, 2, indices, grad_output, "add")


@lowering("adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(grad_output, self, indices):
    return _written(self.shape, 3, indices, grad_output, "add")


def _check_places(indices, output_size):
    volume = "x".join(map(str, output_size))
    message = f"Found an invalid max index: {{value}} (output volumes are of size {volume})"
    index_in_range(indices, math.prod(output_size), RuntimeError, message)


@lowering("max_unpool2d")
def max_unpool2d(self, indices, output_size):
    _check_places(indices, output_size)
    return _written((*self.shape[:-2], *output_size), 2, indices, self, "set")


@lowering("max_unpool3d")
def max_unpool3d(self, indices, output_size, stride, padding):
    _check_places(indices, output_size)
    return _written((*self.shape[:-3], *output_size), 3, indices, self, "set")


# fractional: where a window lies depends on a random number for each plane and dim, an argument of the operator


def _fractional_places(samples, size, length, kernel):
    """Planes by windows by positions."""
    steps = jnp.arange(length)
    start = jnp.full((samples.shape[0], length), size - kernel)
    if length > 1:
        alpha = jnp.asarray((size - kernel) / (length - 1), samples.dtype)
        first = samples[:, None]
        moved = ((steps + first) * alpha).astype(jnp.int64) - (first * alpha).astype(jnp.int64)
        start = jnp.where(steps == length - 1, start, moved)
    return start[..., None] + jnp.arange(kernel)


def _fractional(self, kernel_size, output_size, samples):
    rank = len(output_size)
    spatial, shape = self.shape[-rank:], (*self.shape[:-rank], *output_size)
    samples = samples.reshape(-1, rank)
    places = [_fractional_places(samples[:, d], spatial[d], output_size[d], kernel_size[d]) for d in range(rank)]
    positions = _flat(places, spatial)
    values = jax.vmap(lambda plane, at: plane[at])(_planes(self, rank), positions)
    return _largest(values, positions, shape)


@lowering("fractional_max_pool2d")
def fractional_max_pool2d(self, kernel_size, output_size, random_samples):
    """The numbers of a plane are for width and height, in that order."""
    return _fractional(self, kernel_size, output_size, random_samples[..., ::-1])


@lowering("fractional_max_pool3d")
def fractional_max_pool3d(self, kernel_size, output_size, random_samples):
    return _fractional(self, kernel_size, output_size, random_samples)


@lowering("fractional_max_pool2d_backward")
def fractional_max_pool2d_backward(grad_output, self, kernel_size, output_size, indices):
    return _written(self.shape, 2, indices, grad_output, "add")


@lowering("fractional_max_pool3d_backward")
def fractional_max_pool3d_backward(grad_output, self, kernel_size, output_size, indices):
    return _written(self.shape, 3, indices, grad_output, "add")
