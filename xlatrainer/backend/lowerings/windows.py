"""Sliding windows over the spatial dims of an array: one strided slice for each position in the window.

Pooling, and convolutions on the CPU, are made of these slices, which XLA fuses with what is done to them. The transpose
of a slice is a padding. Spatial dims are the last ones; leading dims are left alone.
"""

import itertools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

__all__ = ["Windows", "at_offset", "padded_for", "per_dim", "spread_from", "windows_of"]


class Windows(NamedTuple):
    """One entry each spatial dim; `output` is the number of windows along it."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output: tuple[int, ...]

    def offsets(self):
        """All positions in a window, row-major."""
        return itertools.product(*map(range, self.kernel))


def per_dim(values, rank):
    """One value for each of `rank` dims: torch gives one for all, or one each."""
    values = tuple(values)
    return values * rank if len(values) == 1 else values


def _output_length(size, kernel, stride, padding, dilation, ceil_mode):
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    length = (-(-span // stride) if ceil_mode else span // stride) + 1
    if ceil_mode and (length - 1) * stride >= size + padding:
        length -= 1  # no window may start in the padding on the right
    return length


def windows_of(spatial, kernel_size, stride, padding, dilation, ceil_mode=False):
    """The windows over an input of `spatial` sizes; an empty stride means the kernel's size."""
    rank = len(spatial)
    kernel = per_dim(kernel_size, rank)
    step = per_dim(stride, rank) if stride else kernel
    pad, gap = per_dim(padding, rank), per_dim(dilation, rank)
    output = tuple(_output_length(*args, ceil_mode) for args in zip(spatial, kernel, step, pad, gap, strict=True))
    return Windows(kernel, step, pad, gap, output)


def padded_for(array, windows, value):
    """The input padded so that every window lies inside; leading dims are left alone."""
    rank = len(windows.kernel)
    pads = [(0, 0, 0)] * (array.ndim - rank)
    for size, kernel, step, pad, gap, length in zip(array.shape[-rank:], *windows, strict=True):
        needed = (length - 1) * step + gap * (kernel - 1) + 1
        pads.append((pad, max(needed - size - pad, 0), 0))
    return lax.pad(array, jnp.asarray(value, array.dtype), pads)


def at_offset(padded, windows, offset):
    """The element at `offset` of every window, in the shape of the output."""
    lead = padded.ndim - len(offset)
    starts = [0] * lead + [o * gap for o, gap in zip(offset, windows.dilation, strict=True)]
    limits = list(padded.shape[:lead])
    for start, step, length in zip(starts[lead:], windows.stride, windows.output, strict=True):
        limits.append(start + (length - 1) * step + 1)
    return lax.slice(padded, starts, limits, [1] * lead + list(windows.stride))


def spread_from(values, windows, offset, spatial):
    """The transpose of `at_offset`: values at their places in an input of `spatial` sizes, zeros elsewhere."""
    rank = len(offset)
    config = [(0, 0, 0)] * (values.ndim - rank)
    for size, o, gap, step, pad, length in zip(
        spatial, offset, windows.dilation, windows.stride, windows.padding, windows.output, strict=True
    ):
        low = o * gap - pad
        config.append((low, size - low - ((length - 1) * step + 1), step - 1))
    return lax.pad(values, jnp.zeros((), values.dtype), config)
