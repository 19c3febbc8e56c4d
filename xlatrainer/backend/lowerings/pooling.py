"""Max and average pooling of 1 to 3 spatial dims, adaptive pooling, and their gradients.

A window is taken as one strided slice for each of its positions, which XLA fuses into a single pass; gradients spread
the output over the same slices. `reduce_window` and its gradient `select_and_scatter` are many times slower on the CPU.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.lowerings.fusion import materialized_images
from xlatrainer.backend.lowerings.registry import lowering
from xlatrainer.backend.lowerings.windows import at_offset, padded_for, spread_from, windows_of


def _lowest(dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf
    return jnp.iinfo(dtype).min


def _flat(places, spatial):
    """Flat positions in an image of each window's places along each dim."""
    flat = np.zeros((1,) * len(spatial), np.int64)
    for dim, (along, size) in enumerate(zip(places, spatial, strict=True)):
        shape = [1] * len(spatial)
        shape[dim] = -1
        flat = flat * size + along.reshape(shape)
    return flat


def _positions(windows, offset, spatial):
    """Flat index, in the unpadded input, of the element at `offset` of every window."""
    return _flat(
        [
            np.arange(length) * step - pad + place * gap
            for place, _, step, pad, gap, length in zip(offset, *windows, strict=True)
        ],
        spatial,
    )


def _shift(windows, offset, spatial):
    """How far the element at `offset` of a window lies behind its first one, in flat positions of the input."""
    flat = 0
    for o, gap, size in zip(offset, windows.dilation, spatial, strict=True):
        flat = flat * size + o * gap
    return flat


def _first_inside(windows, spatial):
    """How far the first element of each window that is not padding lies behind its first one."""
    outside = [np.maximum(pad - np.arange(length) * step, 0) for _, step, pad, _, length in zip(*windows, strict=True)]
    places = [-(-distance // gap) * gap for distance, gap in zip(outside, windows.dilation, strict=True)]
    return _flat(places, spatial).astype(np.int32)


def _kept(array, rank):
    return materialized_images(array, array.ndim - rank - 1)


def _max_pool(self, windows, spatial):
    """The largest of each window, the last NaN if there is any, and its flat position.

    Both are passes of their own, and that of the positions the slower one: it has one comparison for numbers and one
    for NaN, whose outcomes need not wait for each other, and shifts of 32 bits, which are twice as fast as of 64.
    """
    rank = len(spatial)
    padded = padded_for(_kept(self, rank), windows, _lowest(self.dtype))
    has_nan = jnp.issubdtype(self.dtype, jnp.floating)
    first = (0,) * rank
    best = largest = at_offset(padded, windows, first)
    shift = shift_of_nan = jnp.zeros(best.shape, jnp.int32)
    for offset in list(windows.offsets())[1:]:
        value = at_offset(padded, windows, offset)
        here = jnp.int32(_shift(windows, offset, spatial))
        shift = jnp.where(largest >= value, shift, here)
        largest = lax.max(largest, value)
        better = value > best
        if has_nan:
            shift_of_nan = jnp.where(value == value, shift_of_nan, here)
            better |= jnp.isnan(value)
        best = jnp.where(better, value, best)
    if has_nan:
        shift = jnp.where(largest == largest, shift, shift_of_nan)
    if any(windows.padding):  # which is not larger than a window of the lowest values, but comes before them
        shift = jnp.where(largest == _lowest(self.dtype), _first_inside(windows, spatial), shift)
    shift = _kept(shift, rank).astype(jnp.int64)
    return _kept(best, rank), jnp.asarray(_positions(windows, first, spatial)) + shift


def _max_pool_lowering(rank):
    def forward(self, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
        spatial = self.shape[-rank:]
        return _max_pool(self, windows_of(spatial, kernel_size, stride, padding, dilation, ceil_mode), spatial)

    return forward


def _max_pool_backward_lowering(rank):
    def backward(grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
        spatial = self.shape[-rank:]
        windows = windows_of(spatial, kernel_size, stride, padding, dilation, ceil_mode)
        grad_output = _kept(grad_output, rank)
        # How far in its window each is, in memory: every element of the result compares with it, and 64 bits are slow.
        shift = _kept((indices - _positions(windows, (0,) * rank, spatial)).astype(jnp.int32), rank)
        result = jnp.zeros_like(self)
        for offset in windows.offsets():
            chosen = shift == jnp.int32(_shift(windows, offset, spatial))
            result = result + spread_from(jnp.where(chosen, grad_output, 0), windows, offset, spatial)
        return _kept(result, rank)

    return backward


for _rank in (2, 3):
    lowering(f"max_pool{_rank}d_with_indices")(_max_pool_lowering(_rank))
    lowering(f"max_pool{_rank}d_with_indices_backward")(_max_pool_backward_lowering(_rank))


def _divisors(windows, spatial, count_include_pad, divisor_override):
    """What each window's sum is divided by, in the shape of the output."""
    if divisor_override:
        return np.full(windows.output, divisor_override, np.float64)
    total = np.ones((1,) * len(spatial), np.float64)
    for dim, size in enumerate(spatial):
        start = np.arange(windows.output[dim]) * windows.stride[dim] - windows.padding[dim]
        end = np.minimum(start + windows.kernel[dim], size + windows.padding[dim])
        if not count_include_pad:
            start, end = np.maximum(start, 0), np.minimum(end, size)
        shape = [1] * len(spatial)
        shape[dim] = -1
        total = total * (end - start).reshape(shape)
    return total


def _avg_pool_lowering(rank):
    def forward(
        self, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None
    ):
        spatial = self.shape[-rank:]
        windows = windows_of(spatial, kernel_size, stride, padding, (1,), ceil_mode)
        padded = padded_for(self, windows, 0)
        total = sum(at_offset(padded, windows, offset) for offset in windows.offsets())
        divisors = _divisors(windows, spatial, count_include_pad, divisor_override)
        return (total / jnp.asarray(divisors, self.dtype)).astype(self.dtype)

    return forward


def _avg_pool_backward_lowering(rank):
    def backward(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
        spatial = self.shape[-rank:]
        windows = windows_of(spatial, kernel_size, stride, padding, (1,), ceil_mode)
        share = grad_output / jnp.asarray(
            _divisors(windows, spatial, count_include_pad, divisor_override), grad_output.dtype
        )
        return sum(spread_from(share, windows, offset, spatial) for offset in windows.offsets())

    return backward


for _rank in (2, 3):
    lowering(f"avg_pool{_rank}d")(_avg_pool_lowering(_rank))
    lowering(f"avg_pool{_rank}d_backward")(_avg_pool_backward_lowering(_rank))


def _share_matrix(size, length, dtype):
    """Row o holds 1/n at the n inputs that adaptive average pooling gives to output o."""
    matrix = np.zeros((length, size))
    for o in range(length):
        start, end = o * size // length, -(-(o + 1) * size // length)
        matrix[o, start:end] = 1 / (end - start)
    return jnp.asarray(matrix, dtype)


def _along(array, matrix, axis):
    return jnp.moveaxis(jnp.tensordot(array, matrix, axes=((axis,), (1,))), -1, axis)


def _adaptive_avg_pool(self, output_size):
    rank = len(output_size)
    if all(length == 1 for length in output_size):
        axes = tuple(range(self.ndim - rank, self.ndim))
        return jnp.mean(self, axes, keepdims=True).astype(self.dtype)
    for axis, length in zip(range(self.ndim - rank, self.ndim), output_size, strict=True):
        self = _along(self, _share_matrix(self.shape[axis], length, self.dtype), axis)
    return self


def _adaptive_avg_pool_backward(grad_output, self, rank):
    if math.prod(grad_output.shape[-rank:]) == 1:
        return jnp.broadcast_to(grad_output / math.prod(self.shape[-rank:]), self.shape)
    for axis in range(self.ndim - rank, self.ndim):
        matrix = _share_matrix(self.shape[axis], grad_output.shape[axis], self.dtype)
        grad_output = _along(grad_output, matrix.T, axis)
    return grad_output


@lowering("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(self, output_size):
    return _adaptive_avg_pool(self, tuple(output_size))


@lowering("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad_output, self):
    return _adaptive_avg_pool_backward(grad_output, self, 2)


@lowering("_adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(grad_output, self):
    return _adaptive_avg_pool_backward(grad_output, self, 3)
