"""Convolutions in the forms that XLA's CPU backend runs fastest, for the shapes where its own convolution is not.

XLA's convolution on the CPU reaches a third of the speed of a dot at best, a hundredth for small images, and a tenth of
a plain sum for one channel a group. Here windows are unfolded into the rows of a matrix by one gather of whole pixels,
for which channels lie innermost; the rest is one dot. The gradient of the input folds such a matrix by gathers again.
Slices or paddings instead of gathers are a kernel for each position in the window: slower to compile and to run.
`benchmarks/convolution.py` measures every form against XLA's own and torch's; the limits below come from there.

Channels lie innermost inside only: arguments and results have torch's order. XLA turns the transposes into layouts, so
between a convolution and the next there is no copy. Matrices are behind barriers (see `fusion`), since fused into their
readers they would be computed once for each element read.

`geometry` is that of `convolution`. Each function returns None where XLA's own convolution is the better choice.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.lowerings import arithmetic
from xlatrainer.backend.lowerings.fusion import channels_moved
from xlatrainer.backend.lowerings.windows import at_offset, padded_for, spread_from, windows_of

__all__ = ["forward", "in_order", "input_gradient", "weight_gradient"]

MOST_TAPS = 50  # of a sum with one term for each position in the window: more make the program large
FEW_POSITIONS = 64  # of the output, batch included: a dot of so few rows is slower than one of so few columns
MOST_COLUMNS = 6_000_000  # elements of unfolded windows: beyond, writing them costs more than it saves
MOST_INDICES = 2_000_000  # pixels of unfolded windows: their places are a constant of the program


def _over(array, spatial):
    """`array` with dims of size 1 behind it for the spatial ones."""
    return array.reshape(array.shape + (1,) * len(spatial))


def _by_channel(weight, geometry):
    """The kernels of a convolution with one channel a group. Shape: taps x groups x (output channels of a group)."""
    groups = geometry.groups
    return weight.reshape(groups, weight.shape[0] // groups, -1).transpose(2, 0, 1)


def _pixels(array):
    """N x C x spatial to N * spatial x C, in memory."""
    return lax.optimization_barrier(channels_moved(array, 1, array.ndim - 1).reshape(-1, array.shape[1]))


def _images(pixels, batch, spatial):
    """The inverse of `_pixels`, of a matrix that is then in memory."""
    pixels = lax.optimization_barrier(pixels)
    images = pixels.reshape(batch, *spatial, pixels.shape[1])
    return channels_moved(images, images.ndim - 1, 1)


def _flat(places, sizes, outside):
    """Flat positions from those along each dim, negative where there is none; the result then holds `outside`.

    `places` has an array for each dim, of one rank, with two axes; the result has all first axes, then all second ones.
    """
    rank, flat, inside = len(places), 0, True
    for dim, (along, size) in enumerate(zip(places, sizes, strict=True)):
        shape = [1] * (2 * rank)
        shape[dim], shape[rank + dim] = along.shape
        along = along.reshape(shape)
        flat, inside = flat * size + along, inside & (along >= 0)
    return np.where(inside, flat, outside)


def _pixels_of_windows(windows, batch, spatial):
    """For each window, batch included, and each of its taps the row of `_pixels`; a row too many for the padding."""
    places = [np.arange(batch)[:, None]]
    for size, kernel, step, pad, gap, length in zip(spatial, *windows, strict=True):
        along = np.arange(length)[:, None] * step + np.arange(kernel) * gap - pad
        places.append(np.where(along < size, along, -1))
    return _flat(places, (batch, *spatial), batch * math.prod(spatial)).reshape(-1, math.prod(windows.kernel))


def _windows_of_pixels(windows, batch, spatial):
    """For each pixel and each tap the window that has the pixel there; one too many where there is none."""
    places = [np.arange(batch)[:, None]]
    for size, kernel, step, pad, gap, length in zip(spatial, *windows, strict=True):
        start = np.arange(size)[:, None] - np.arange(kernel) * gap + pad
        places.append(np.where((start % step == 0) & (start < length * step), start // step, -1))
    outside = batch * math.prod(windows.output)
    return _flat(places, (batch, *windows.output), outside).reshape(-1, math.prod(windows.kernel))


def _rows(matrix, places):
    """Yield `matrix[positions]` for each row of `places`, zeros where a position is too large.

    XLA does not see what places there are: kernels that differ in them alone are one, and all gathers of a kernel read
    one table.
    """
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    table = lax.optimization_barrier(jnp.asarray(places.astype(np.int32)))
    for number, positions in enumerate(places):
        index = lax.index_in_dim(table, number, keepdims=False)
        rows = lax.gather(matrix, lax.expand_dims(index, (1,)), numbers, (1, matrix.shape[1]), mode="clip")
        if (positions >= matrix.shape[0]).any():
            inside = arithmetic.less(index, matrix.shape[0])
            rows = arithmetic.where(lax.broadcast_in_dim(inside, rows.shape, (0,)), rows, 0)
        yield rows


def _unfolds(positions, channels, geometry, kernel):
    """Whether a dot of unfolded windows is the form to take."""
    pixels = math.prod(kernel) * positions
    few = pixels <= MOST_INDICES and pixels * channels <= MOST_COLUMNS
    return geometry.groups == 1 and positions * channels > 0 and (few or math.prod(kernel) == 1)


def _is_plain(windows):
    """Each window is one pixel, in the same order."""
    ones = (1,) * len(windows.kernel)
    return windows.kernel == windows.stride == ones and not any(windows.padding)


class _Unfolding:
    """How the columns of unfolded windows are ordered: what is smaller, they or the weight, is brought into order.

    The weight has channels first, then taps; a gather of pixels gives taps first.
    """

    def __init__(self, windows, batch, spatial, channels, out_channels):
        self.windows, self.batch, self.spatial, self.channels = windows, batch, spatial, channels
        self.taps, self.positions = math.prod(windows.kernel), batch * math.prod(windows.output)
        self.taps_first = self.positions >= out_channels and self.taps > 1

    def unfold(self, pixels):
        """Pixels x C to positions x columns."""
        if _is_plain(self.windows):
            return pixels
        places = _pixels_of_windows(self.windows, self.batch, self.spatial).reshape(1, -1)
        (columns,) = lax.optimization_barrier(tuple(_rows(pixels, places)))
        if not self.taps_first:
            columns = columns.reshape(self.positions, self.taps, -1).swapaxes(1, 2)
        return columns.reshape(self.positions, -1)

    def fold(self, columns):
        """Positions x columns to N x C x spatial: the transpose of `unfold`."""
        if _is_plain(self.windows):
            return _images(columns, self.batch, self.spatial)
        if not self.taps_first:
            columns = columns.reshape(self.positions, self.channels, self.taps).swapaxes(1, 2)
        columns = lax.optimization_barrier(columns.reshape(-1, self.channels))
        places = _windows_of_pixels(self.windows, self.batch, self.spatial) * self.taps + np.arange(self.taps)
        return _images(functools.reduce(lax.add, _rows(columns, places.T)), self.batch, self.spatial)

    def matrix(self, weight):
        """O x C x kernel to O x columns."""
        weight = weight.reshape(weight.shape[0], -1, self.taps)
        if self.taps_first:
            weight = lax.optimization_barrier(weight.swapaxes(1, 2))
        return weight.reshape(weight.shape[0], -1)

    def weight(self, matrix, shape):
        """The inverse of `matrix`."""
        if self.taps_first:
            matrix = matrix.reshape(shape[0], self.taps, -1).swapaxes(1, 2)
        return matrix.reshape(shape)


def forward(input, weight, geometry):
    """Shapes: N x C x spatial, O x C/groups x kernel to N x O x output."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(input.shape[2:], weight.shape[2:], stride, padding, dilation)
    taps, positions = math.prod(windows.kernel), input.shape[0] * math.prod(windows.output)
    if weight.shape[1] == 1 and 1 < taps <= MOST_TAPS:
        input, weight = lax.optimization_barrier((input, weight))
        padded = padded_for(input[:, :, None], windows, 0)
        total = 0
        for offset, kernel in zip(windows.offsets(), _by_channel(weight, geometry), strict=True):
            total = total + at_offset(padded, windows, offset) * _over(kernel, windows.output)
        return lax.optimization_barrier(total).reshape(input.shape[0], weight.shape[0], *windows.output)
    if _unfolds(positions, input.shape[1], geometry, windows.kernel):
        unfolding = _Unfolding(windows, input.shape[0], input.shape[2:], input.shape[1], weight.shape[0])
        columns, matrix = unfolding.unfold(_pixels(input)), unfolding.matrix(weight)
        few = positions <= FEW_POSITIONS
        out = lax.optimization_barrier(lax.dot(matrix, columns.T)).T if few else lax.dot(columns, matrix.T)
        return _images(out, input.shape[0], windows.output)
    return None


def input_gradient(grad_output, weight, geometry, spatial):
    """Shapes: N x O x output, O x C/groups x kernel to N x C x `spatial`."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(spatial, weight.shape[2:], stride, padding, dilation)
    windows = windows._replace(output=tuple(grad_output.shape[2:]))  # output_padding makes more of them
    batch, channels = grad_output.shape[0], weight.shape[1] * groups
    taps, positions = math.prod(windows.kernel), batch * math.prod(windows.output)
    if weight.shape[:2] == (groups, 1) and taps <= MOST_TAPS:
        grad_output, weight = lax.optimization_barrier((grad_output, weight))
        total = 0
        for offset, kernel in zip(windows.offsets(), _by_channel(weight, geometry), strict=True):
            share = grad_output * _over(kernel[:, 0], windows.output)
            total = total + spread_from(share, windows, offset, spatial)
        return lax.optimization_barrier(total)
    if taps <= MOST_TAPS and _unfolds(positions, channels, geometry, windows.kernel):
        unfolding = _Unfolding(windows, batch, spatial, channels, weight.shape[0])
        return unfolding.fold(lax.dot(_pixels(grad_output), unfolding.matrix(weight)))
    return None


def weight_gradient(input, grad_output, geometry, kernel):
    """Shapes: N x C x spatial, N x O x output to O x C/groups x `kernel`."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(input.shape[2:], kernel, stride, padding, dilation)
    windows = windows._replace(output=tuple(grad_output.shape[2:]))
    out_channels, positions = grad_output.shape[1], input.shape[0] * math.prod(windows.output)
    taps = math.prod(kernel)
    if input.shape[1] == out_channels == groups and taps <= MOST_TAPS:
        input, grad_output = lax.optimization_barrier((input, grad_output))
        padded, axes = padded_for(input, windows, 0), (0, *range(2, input.ndim))
        sums = [jnp.sum(at_offset(padded, windows, offset) * grad_output, axes) for offset in windows.offsets()]
        return jnp.stack(sums, 1).reshape(groups, 1, *kernel)
    if _unfolds(positions, input.shape[1], geometry, kernel):
        unfolding = _Unfolding(windows, input.shape[0], input.shape[2:], input.shape[1], out_channels)
        # Together, or XLA would take the columns of the forward pass, and keep those of all layers in memory until now.
        grad, pixels = lax.optimization_barrier((_pixels(grad_output).T, _pixels(input)))
        return unfolding.weight(lax.dot(grad, unfolding.unfold(pixels)), (out_channels, input.shape[1], *kernel))
    return None


def in_order(grad_input, grad_weight):
    """Both arrays behind one barrier; the first with its channels innermost, as it was computed."""
    matrix = grad_weight.reshape(grad_weight.shape[0], -1)
    images = channels_moved(grad_input, 1, grad_input.ndim - 1)
    pixels, matrix = lax.optimization_barrier((images.reshape(-1, images.shape[-1]), matrix))
    images = channels_moved(pixels.reshape(images.shape), images.ndim - 1, 1)
    return images, matrix.reshape(grad_weight.shape)
