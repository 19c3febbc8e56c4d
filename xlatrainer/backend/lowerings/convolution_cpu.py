"""Convolutions in the forms that XLA's CPU backend runs fastest, for the shapes where its own convolution is not.

XLA's convolution on the CPU is good for large images with many channels. It is up to a hundred times slower than a dot
for small images and for the gradient of the input, and ten times slower than a plain sum for one channel a group.
`benchmarks/convolution.py` measures every form against it; the limits below come from there.

`geometry` is that of `convolution`. Each function returns None where XLA's own convolution is the better choice.
"""

import math

import jax.numpy as jnp

from xlatrainer.backend.lowerings.windows import at_offset, padded_for, spread_from, windows_of

__all__ = ["forward", "input_gradient", "weight_gradient"]

MOST_TAPS = 50  # of a sum with one term for each position in the window: more make the program large
FEW_POSITIONS = 512  # of the output, batch included: up to there a dot of unfolded windows wins
MOST_COLUMNS = 4_000_000  # elements of unfolded windows: beyond, writing them costs more than it saves


def _columns(array, windows):
    """The windows unfolded. Shapes: N x C x spatial to C x taps x N x output: the long side of a dot innermost."""
    padded = padded_for(array.swapaxes(0, 1), windows, 0)
    return jnp.stack([at_offset(padded, windows, offset) for offset in windows.offsets()], 1)


def _over(array, spatial):
    """`array` with dims of size 1 behind it for the spatial ones."""
    return array.reshape(array.shape + (1,) * len(spatial))


def _by_channel(weight, geometry):
    """The kernels of a convolution with one channel a group. Shape: taps x groups x (output channels of a group)."""
    groups = geometry.groups
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(2, 0, 1)


def forward(input, weight, geometry):
    """Shapes: N x C x spatial, O x C/groups x kernel to N x O x output."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(input.shape[2:], weight.shape[2:], stride, padding, dilation)
    taps, positions = math.prod(windows.kernel), input.shape[0] * math.prod(windows.output)
    out_shape = (input.shape[0], weight.shape[0], *windows.output)
    if weight.shape[1] == 1 and 1 < taps <= MOST_TAPS:
        padded = padded_for(input[:, :, None], windows, 0)
        total = 0
        for offset, kernel in zip(windows.offsets(), _by_channel(weight, geometry), strict=True):
            total = total + at_offset(padded, windows, offset) * _over(kernel, windows.output)
        return total.reshape(out_shape)
    if groups == 1 and (taps == 1 or positions <= FEW_POSITIONS // 2):
        columns = _columns(input, windows).reshape(-1, positions)
        out = weight.reshape(weight.shape[0], -1) @ columns
        return out.reshape(weight.shape[0], input.shape[0], *windows.output).swapaxes(0, 1)
    return None


def input_gradient(grad_output, weight, geometry, spatial):
    """Shapes: N x O x output, O x C/groups x kernel to N x C x `spatial`."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(spatial, weight.shape[2:], stride, padding, dilation)
    windows = windows._replace(output=tuple(grad_output.shape[2:]))  # output_padding makes more of them
    batch, channels = grad_output.shape[0], weight.shape[1] * groups
    taps, positions = math.prod(windows.kernel), batch * math.prod(windows.output)
    if weight.shape[:2] == (groups, 1) and taps <= MOST_TAPS:
        total = 0
        for offset, kernel in zip(windows.offsets(), _by_channel(weight, geometry), strict=True):
            share = grad_output * _over(kernel[:, 0], windows.output)
            total = total + spread_from(share, windows, offset, spatial)
        return total
    if groups == 1 and taps * channels * positions <= MOST_COLUMNS:
        columns = weight.reshape(weight.shape[0], -1).T @ grad_output.swapaxes(0, 1).reshape(weight.shape[0], -1)
        columns = columns.reshape(channels, taps, batch, *windows.output)
        parts = (spread_from(columns[:, i], windows, o, spatial) for i, o in enumerate(windows.offsets()))
        return sum(parts).swapaxes(0, 1)
    return None


def weight_gradient(input, grad_output, geometry, kernel):
    """Shapes: N x C x spatial, N x O x output to O x C/groups x `kernel`."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(input.shape[2:], kernel, stride, padding, dilation)
    windows = windows._replace(output=tuple(grad_output.shape[2:]))
    out_channels, positions = grad_output.shape[1], input.shape[0] * math.prod(windows.output)
    taps = math.prod(kernel)
    if input.shape[1] == out_channels == groups and taps <= MOST_TAPS:
        padded, axes = padded_for(input, windows, 0), (0, *range(2, input.ndim))
        sums = [jnp.sum(at_offset(padded, windows, offset) * grad_output, axes) for offset in windows.offsets()]
        return jnp.stack(sums, 1).reshape(groups, 1, *kernel)
    if input.shape[1] == 1 and taps <= MOST_TAPS:
        padded = padded_for(input, windows, 0)
        columns = jnp.concatenate([at_offset(padded, windows, offset) for offset in windows.offsets()], 1)
        flat = (input.shape[0], -1, math.prod(windows.output))
        return jnp.einsum("nop,nkp->ok", grad_output.reshape(flat), columns.reshape(flat)).reshape(-1, 1, *kernel)
    if groups == 1 and (taps == 1 or positions <= FEW_POSITIONS):
        columns = _columns(input, windows).reshape(-1, positions)
        grad = grad_output.swapaxes(0, 1).reshape(out_channels, positions)
        return (grad @ columns.T).reshape(out_channels, input.shape[1], *kernel)
    return None
