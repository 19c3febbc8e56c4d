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
MOST_GROUPED_COLUMNS = 60_000_000  # the same for groups of channels: there XLA's own takes fifty times as long
MOST_INDICES = 2_000_000  # pixels of an image's unfolded windows: their places are a constant of the program


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
    return _channels_second(lax.optimization_barrier(pixels), batch, spatial, pixels.shape[1])


def _channels_second(pixels, batch, spatial, channels):
    images = pixels.reshape(batch, *spatial, channels)
    return channels_moved(images, images.ndim - 1, 1)


def _by_image(rows):
    """Images x rows x channels in memory. With images apart, XLA counts them in a loop instead of by divisions."""
    return lax.optimization_barrier(rows.reshape(rows.shape[:2]) if rows.shape[2] == 1 else rows)


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


def _pixels_of_windows(windows, spatial):
    """For each window of an image and each of its taps the pixel; one too many for the padding."""
    places = []
    for size, kernel, step, pad, gap, length in zip(spatial, *windows, strict=True):
        along = np.arange(length)[:, None] * step + np.arange(kernel) * gap - pad
        places.append(np.where(along < size, along, -1))
    return _flat(places, spatial, math.prod(spatial)).reshape(-1, math.prod(windows.kernel))


def _windows_of_pixels(windows, spatial):
    """For each pixel of an image and each tap the window that has the pixel there; one too many where there is none."""
    places = []
    for size, kernel, step, pad, gap, length in zip(spatial, *windows, strict=True):
        start = np.arange(size)[:, None] - np.arange(kernel) * gap + pad
        places.append(np.where((start % step == 0) & (start < length * step), start // step, -1))
    return _flat(places, windows.output, math.prod(windows.output)).reshape(-1, math.prod(windows.kernel))


def _rows(matrix, batch, places):
    """Yield for each row of `places` the rows that it names of each image's part of `matrix`; zeros if there are none.

    The places are those of one image: the table stays in the caches. XLA does not see what places there are: kernels
    that differ in them alone are one, and all gathers of a kernel read one table.
    """
    numbers = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    table = lax.optimization_barrier(jnp.asarray(places.astype(np.int32)))
    size, channels = matrix.shape[0] // batch, matrix.shape[1]
    shape = (batch, places.shape[1])
    starts = lax.broadcast_in_dim(np.arange(batch, dtype=np.int32) * np.int32(size), shape, (0,))
    for number, positions in enumerate(places):
        place = lax.index_in_dim(table, number, keepdims=False)
        index = lax.expand_dims(lax.add(starts, lax.broadcast_in_dim(place, shape, (1,))), (2,))
        rows = lax.gather(matrix, index, numbers, (1, channels), mode="clip")
        if (positions >= size).any():
            inside = arithmetic.less(place, size)
            rows = arithmetic.where(lax.broadcast_in_dim(inside, rows.shape, (1,)), rows, 0)
        yield rows


def _unfolds(batch, windows, channels, geometry):
    """Whether a dot of unfolded windows is the form to take."""
    taps, positions = math.prod(windows.kernel), math.prod(windows.output)
    most = MOST_COLUMNS if geometry.groups == 1 else MOST_GROUPED_COLUMNS
    few = taps * positions <= MOST_INDICES and batch * taps * positions * channels <= most
    return batch * positions * channels > 0 and (few or taps == 1)


def _apart(array, groups):
    """N x C x spatial to groups * N x C/groups x spatial: the groups of channels are images of their own."""
    if groups == 1:
        return array
    batch, channels, *spatial = array.shape
    parts = array.reshape(batch, groups, channels // groups, *spatial)
    return parts.swapaxes(0, 1).reshape(groups * batch, channels // groups, *spatial)


def _together(array, groups):
    """The inverse of `_apart`."""
    if groups == 1:
        return array
    images, channels, *spatial = array.shape
    parts = array.reshape(groups, images // groups, channels, *spatial).swapaxes(0, 1)
    return parts.reshape(images // groups, groups * channels, *spatial)


def _by_group(left, right, groups):
    """Products of the matrices of each group, which lie one below the other in `left`, `right` and the result."""
    if groups == 1:  # the plain product of most convolutions
        return lax.dot(left, right)
    product = left.reshape(groups, -1, left.shape[1]) @ right.reshape(groups, -1, right.shape[1])
    return product.reshape(-1, right.shape[1])


def _transposed(matrix, groups):
    """The matrix of each group, transposed."""
    if groups == 1:
        return matrix.T
    return matrix.reshape(groups, -1, matrix.shape[1]).swapaxes(1, 2).reshape(groups * matrix.shape[1], -1)


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
        places = _pixels_of_windows(self.windows, self.spatial).reshape(1, -1)
        (rows,) = _rows(pixels, self.batch, places)
        columns = _by_image(rows)
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
        places = _windows_of_pixels(self.windows, self.spatial) * self.taps + np.arange(self.taps)
        folded = _by_image(functools.reduce(lax.add, _rows(columns, self.batch, places.T)))
        return _channels_second(folded, self.batch, self.spatial, self.channels)

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
    if _unfolds(input.shape[0], windows, input.shape[1], geometry):
        input = _apart(input, groups)
        unfolding = _Unfolding(windows, input.shape[0], input.shape[2:], input.shape[1], weight.shape[0] // groups)
        columns, matrix = unfolding.unfold(_pixels(input)), unfolding.matrix(weight)
        if groups == 1 and positions <= FEW_POSITIONS:
            out = lax.optimization_barrier(lax.dot(matrix, columns.T)).T
        else:
            out = _by_group(columns, _transposed(matrix, groups), groups)
        return _together(_images(out, input.shape[0], windows.output), groups)
    return None


def input_gradient(grad_output, weight, geometry, spatial):
    """Shapes: N x O x output, O x C/groups x kernel to N x C x `spatial`."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(spatial, weight.shape[2:], stride, padding, dilation)
    windows = windows._replace(output=tuple(grad_output.shape[2:]))  # output_padding makes more of them
    batch, channels = grad_output.shape[0], weight.shape[1] * groups
    taps = math.prod(windows.kernel)
    if weight.shape[:2] == (groups, 1) and taps <= MOST_TAPS:
        grad_output, weight = lax.optimization_barrier((grad_output, weight))
        total = 0
        for offset, kernel in zip(windows.offsets(), _by_channel(weight, geometry), strict=True):
            share = grad_output * _over(kernel[:, 0], windows.output)
            total = total + spread_from(share, windows, offset, spatial)
        return lax.optimization_barrier(total)
    if taps <= MOST_TAPS and _unfolds(batch, windows, channels, geometry):
        unfolding = _Unfolding(windows, groups * batch, spatial, channels // groups, weight.shape[0] // groups)
        pixels = _pixels(_apart(grad_output, groups))
        return _together(unfolding.fold(_by_group(pixels, unfolding.matrix(weight), groups)), groups)
    return None


def weight_gradient(input, grad_output, geometry, kernel):
    """Shapes: N x C x spatial, N x O x output to O x C/groups x `kernel`."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(input.shape[2:], kernel, stride, padding, dilation)
    windows = windows._replace(output=tuple(grad_output.shape[2:]))
    out_channels, taps = grad_output.shape[1], math.prod(kernel)
    if input.shape[1] == out_channels == groups and taps <= MOST_TAPS:
        input, grad_output = lax.optimization_barrier((input, grad_output))
        padded, axes = padded_for(input, windows, 0), (0, *range(2, input.ndim))
        sums = [jnp.sum(at_offset(padded, windows, offset) * grad_output, axes) for offset in windows.offsets()]
        return jnp.stack(sums, 1).reshape(groups, 1, *kernel)
    if _unfolds(input.shape[0], windows, input.shape[1], geometry):
        input, grad_output = _apart(input, groups), _apart(grad_output, groups)
        unfolding = _Unfolding(windows, input.shape[0], input.shape[2:], input.shape[1], out_channels // groups)
        # Together, or XLA would take the columns of the forward pass, and keep those of all layers in memory until now.
        grad, pixels = lax.optimization_barrier((_transposed(_pixels(grad_output), groups), _pixels(input)))
        matrix = _by_group(grad, unfolding.unfold(pixels), groups)
        return unfolding.weight(matrix, (out_channels, input.shape[1], *kernel))
    return None


def in_order(grad_input, grad_weight):
    """Both arrays behind one barrier; the first with its channels innermost, as it was computed."""
    matrix = grad_weight.reshape(grad_weight.shape[0], -1)
    images = channels_moved(grad_input, 1, grad_input.ndim - 1)
    pixels, matrix = lax.optimization_barrier((images.reshape(-1, images.shape[-1]), matrix))
    images = channels_moved(pixels.reshape(images.shape), images.ndim - 1, 1)
    return images, matrix.reshape(grad_weight.shape)
