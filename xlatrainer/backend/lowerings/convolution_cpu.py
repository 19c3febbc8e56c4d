"""Convolutions in the forms that XLA's CPU backend runs fastest, for the shapes where its own convolution is not.

XLA's convolution on the CPU reaches a third of the speed of a dot at best, a hundredth for small images, and a tenth of
a plain sum for one channel a group. Here windows are unfolded into the rows of a matrix by one gather of whole pixels,
for which channels lie innermost; the rest is one dot. The gradient of the input folds such a matrix by gathers again.
Slices or paddings instead of gathers are a kernel for each position in the window: slower to compile and to run.
`benchmarks/convolution.py` measures every form against XLA's own and torch's; the limits below come from there.

`convolution_spans` does the same for large images, a span at a time; one channel a group is `convolution_depthwise`'s.

`geometry` is that of `convolution`. Each function returns None where XLA's own convolution is the better choice.

May import: convolution_depthwise, convolution_spans, unfolding, fusion, windows, jax.
"""

import functools
import math

import numpy as np
from jax import lax

from xlatrainer.backend.lowerings import convolution_depthwise, convolution_spans
from xlatrainer.backend.lowerings.fusion import channels_moved
from xlatrainer.backend.lowerings.unfolding import (
    apart,
    by_image,
    channels_second,
    images_of,
    pixels_of,
    pixels_of_windows,
    rows_of,
    together,
    windows_of_pixels,
    with_bias,
)
from xlatrainer.backend.lowerings.windows import windows_of

__all__ = ["forward", "in_order", "input_gradient", "weight_gradient"]

MOST_TAPS = 50  # gathers that fold a matrix, one for each position in the window: more make the program large
MOST_DEPTHWISE_TAPS = 1000  # terms of a sum: 31 x 31 of them take XLA a second and a half to compile
FEW_POSITIONS = 64  # of the output, batch included: a dot of so few rows is slower than one of so few columns
MOST_COLUMNS = 4_000_000  # elements of unfolded windows: beyond, they go through memory, unless unfolded in spans
MOST_INDICES = 2_000_000  # pixels of an image's unfolded windows: their places are a constant of the program


def _unfolds(batch, windows, channels, geometry):
    """Whether a dot of unfolded windows is the form to take."""
    taps, positions = math.prod(windows.kernel), math.prod(windows.output)
    few = taps * positions <= MOST_INDICES and batch * taps * positions * channels <= MOST_COLUMNS
    return batch * positions * channels > 0 and (few or taps == 1)


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
        places = pixels_of_windows(self.windows, self.spatial).reshape(1, -1)
        (rows,) = rows_of(pixels, self.batch, places)
        columns = by_image(rows)
        if not self.taps_first:
            columns = columns.reshape(self.positions, self.taps, -1).swapaxes(1, 2)
        return columns.reshape(self.positions, -1)

    def fold(self, columns):
        """Positions x columns to N x C x spatial: the transpose of `unfold`."""
        if _is_plain(self.windows):
            return images_of(columns, self.batch, self.spatial)
        if not self.taps_first:
            columns = columns.reshape(self.positions, self.channels, self.taps).swapaxes(1, 2)
        columns = lax.optimization_barrier(columns.reshape(-1, self.channels))
        places = windows_of_pixels(self.windows, self.spatial) * self.taps + np.arange(self.taps)
        folded = by_image(functools.reduce(lax.add, rows_of(columns, self.batch, places.T)))
        return channels_second(folded, self.batch, self.spatial, self.channels)

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


def forward(input, weight, geometry, bias=None):
    """Shapes: N x C x spatial, O x C/groups x kernel, O to N x O x output."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(input.shape[2:], weight.shape[2:], stride, padding, dilation)
    taps, positions = math.prod(windows.kernel), input.shape[0] * math.prod(windows.output)
    if weight.shape[1] == 1 and 1 < taps <= MOST_DEPTHWISE_TAPS:
        return convolution_depthwise.forward(input, weight, windows, bias)
    if _unfolds(input.shape[0], windows, input.shape[1], geometry):
        input = apart(input, groups)
        unfolding = _Unfolding(windows, input.shape[0], input.shape[2:], input.shape[1], weight.shape[0] // groups)
        columns, matrix = unfolding.unfold(pixels_of(input)), unfolding.matrix(weight)
        if groups == 1 and positions <= FEW_POSITIONS:
            out = lax.optimization_barrier(lax.dot(matrix, columns.T)).T
        else:
            out = _by_group(columns, _transposed(matrix, groups), groups)
        out = together(images_of(out, input.shape[0], windows.output), groups)
    else:
        out = convolution_spans.forward(input, weight, windows, groups)
    return None if out is None else with_bias(out, bias)  # whoever reads it adds it, in its own pass


def input_gradient(grad_output, weight, geometry, spatial):
    """Shapes: N x O x output, O x C/groups x kernel to N x C x `spatial`."""
    stride, padding, dilation, groups = geometry
    windows = windows_of(spatial, weight.shape[2:], stride, padding, dilation)
    windows = windows._replace(output=tuple(grad_output.shape[2:]))  # output_padding makes more of them
    batch, channels = grad_output.shape[0], weight.shape[1] * groups
    taps = math.prod(windows.kernel)
    if weight.shape[:2] == (groups, 1) and taps <= MOST_DEPTHWISE_TAPS:
        return convolution_depthwise.input_gradient(grad_output, weight, windows, spatial)
    if taps <= MOST_TAPS and _unfolds(batch, windows, channels, geometry):
        unfolding = _Unfolding(windows, groups * batch, spatial, channels // groups, weight.shape[0] // groups)
        pixels = pixels_of(apart(grad_output, groups))
        return together(unfolding.fold(_by_group(pixels, unfolding.matrix(weight), groups)), groups)
    return convolution_spans.input_gradient(grad_output, weight, windows, groups, spatial)


def weight_gradient(input, grad_output, geometry, kernel, alone=False):
    """Shapes: N x C x spatial, N x O x output to O x C/groups x `kernel`.

    `alone`: the input's gradient, which needs the pixels of the output's, is not asked for.
    """
    stride, padding, dilation, groups = geometry
    windows = windows_of(input.shape[2:], kernel, stride, padding, dilation)
    windows = windows._replace(output=tuple(grad_output.shape[2:]))
    out_channels, taps = grad_output.shape[1], math.prod(kernel)
    if input.shape[1] == out_channels == groups and taps <= MOST_DEPTHWISE_TAPS:
        return convolution_depthwise.weight_gradient(input, grad_output, windows)
    if _unfolds(input.shape[0], windows, input.shape[1], geometry):
        input, grad_output = apart(input, groups), apart(grad_output, groups)
        unfolding = _Unfolding(windows, input.shape[0], input.shape[2:], input.shape[1], out_channels // groups)
        if alone and groups == 1:  # one transpose instead of two: nobody else needs pixels
            grad = channels_moved(grad_output, 1, 0).reshape(out_channels, -1)
        else:
            grad = _transposed(pixels_of(grad_output), groups)
        # Together, or XLA would take the columns of the forward pass, and keep those of all layers in memory until now.
        grad, pixels = lax.optimization_barrier((grad, pixels_of(input)))
        matrix = _by_group(grad, unfolding.unfold(pixels), groups)
        return unfolding.weight(matrix, (out_channels, input.shape[1], *kernel))
    return convolution_spans.weight_gradient(input, grad_output, windows, groups)


def in_order(grad_input, grad_weight):
    """Both arrays behind one barrier; the first with its channels innermost, as it was computed."""
    matrix = grad_weight.reshape(grad_weight.shape[0], -1)
    images = channels_moved(grad_input, 1, grad_input.ndim - 1)
    pixels, matrix = lax.optimization_barrier((images.reshape(-1, images.shape[-1]), matrix))
    images = channels_moved(pixels.reshape(images.shape), images.ndim - 1, 1)
    return images, matrix.reshape(grad_weight.shape)
