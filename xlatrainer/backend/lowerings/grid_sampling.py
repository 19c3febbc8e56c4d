"""`grid_sample`: an image (or volume) read at places that another tensor names, and its gradients.

A place between elements is a weighted sum of its neighbours; each neighbour is one gather. The gradients are JAX's own
of that sum, so the functions below have the slopes that torch gives them, also where they have a corner.
"""

import itertools
import math

import jax
import jax.numpy as jnp

from xlatrainer.backend.dtypes import compute_dtype, from_numpy
from xlatrainer.backend.lowerings.registry import lowering
from xlatrainer.backend.lowerings.resampling import CUBIC

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _unnormalized(coordinate, size, align_corners):
    """From -1 .. 1 to 0 .. size - 1."""
    if align_corners:
        return (coordinate + 1) / 2 * (size - 1)
    return ((coordinate + 1) * size - 1) / 2


def _clipped(coordinate, size):
    """Slope 0 on the border itself too, where `jnp.clip` has 1/2; a NaN is at 0."""
    inside = (coordinate > 0) & (coordinate < size - 1)
    return jnp.where(inside, coordinate, jnp.where(coordinate >= size - 1, size - 1, 0).astype(coordinate.dtype))


def _reflected(coordinate, size, align_corners):
    """Mirrored at the first and last element (`align_corners`), or half an element beyond, as often as it takes."""
    low, span = (0, size - 1) if align_corners else (-0.5, size)
    if not span:
        return jnp.zeros_like(coordinate)
    distance = jnp.where(coordinate < low, low - coordinate, coordinate - low)
    flips = jnp.floor(distance / span)
    rest = distance - flips * span
    return jnp.where(flips % 2 == 0, rest, span - rest) + low


def _padded(coordinate, size, padding_mode, align_corners):
    if padding_mode == _ZEROS:
        return coordinate
    if padding_mode == _REFLECTION:
        coordinate = _reflected(coordinate, size, align_corners)
    return _clipped(coordinate, size)


def _read(input, places):
    """`input[n, :, places[0][n], ...]`, zeros outside; places are whole numbers of a float dtype."""
    sizes = input.shape[2:]
    flat, inside = 0, True
    for place, size in zip(places, sizes, strict=True):
        inside = inside & (place >= 0) & (place <= size - 1)
        flat = flat * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    flat = jnp.where(inside, flat, 0)
    planes = input.reshape(*input.shape[:2], math.prod(sizes))
    values = jax.vmap(lambda image, at: jnp.take(image, at, axis=1, mode="clip"))(planes, flat)
    return jnp.where(inside[:, None], values, 0)


def _linear_taps(coordinate):
    first = jax.lax.stop_gradient(jnp.floor(coordinate))
    share = coordinate - first
    return [(first, 1 - share), (first + 1, share)]


def _cubic_taps(coordinate):
    first = jax.lax.stop_gradient(jnp.floor(coordinate))
    share = coordinate - first
    taps = []
    for offset in (-1, 0, 1, 2):
        distance = share + 1 if offset < 0 else share if offset == 0 else offset - share
        if offset in (0, 1):
            weight = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
        else:
            weight = ((distance - 5) * distance + 8) * distance * CUBIC - 4 * CUBIC
        taps.append((first + offset, weight))
    return taps


def _sample(input, grid, interpolation_mode, padding_mode, align_corners):
    """Coordinates in `grid` are in the order x, y, z: the reverse of the dims of `input`."""
    sizes = input.shape[2:]
    coordinates = [_unnormalized(grid[..., -1 - d], size, align_corners) for d, size in enumerate(sizes)]

    def pad(places):
        return [_padded(place, size, padding_mode, align_corners) for place, size in zip(places, sizes, strict=True)]

    if interpolation_mode == _NEAREST:
        return _read(input, [jax.lax.stop_gradient(jnp.round(place)) for place in pad(coordinates)])
    if interpolation_mode == _BICUBIC:
        return _all_at_once(input, [_cubic_taps(place) for place in coordinates], pad)
    total = 0
    for corner in itertools.product(*[_linear_taps(place) for place in pad(coordinates)]):
        value = _read(input, [place for place, _ in corner])
        for _, weight in corner:
            value = value * weight[:, None]
        total = total + value
    return total


def _all_at_once(input, taps, pad):
    """The weighted sum of all neighbours by one gather: sixteen, with their gradients, take XLA seconds to compile."""
    corners = list(itertools.product(*taps))
    places = pad([jnp.stack([corner[d][0] for corner in corners], 1) for d in range(len(taps))])
    weights = jnp.stack([math.prod(weight for _, weight in corner) for corner in corners], 1)
    return (_read(input, places) * weights[:, None]).sum(2)


def _wide(array):
    return array.astype(compute_dtype(from_numpy(array.dtype)))


@lowering("grid_sampler_2d", "_grid_sampler_2d_cpu_fallback", "grid_sampler_3d")
def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    result = _sample(_wide(input), _wide(grid), interpolation_mode, padding_mode, align_corners)
    return result.astype(input.dtype)


@lowering("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    def sample(input, grid):
        return _sample(input, grid, interpolation_mode, padding_mode, align_corners)

    _, transposed = jax.vjp(sample, _wide(input), _wide(grid))
    grad_input, grad_grid = transposed(_wide(grad_output))
    return grad_input.astype(input.dtype) if output_mask[0] else None, grad_grid.astype(grid.dtype)
