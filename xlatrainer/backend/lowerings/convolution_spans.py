"""Convolutions of large images on the CPU: their windows are unfolded span by span, in a loop of the program.

Unfolded at once, the windows of large images go through memory, which costs what the dot of them saves. The columns of
a span stay in the caches. A span has some images of the batch, or a part of one. `benchmarks/convolution.py` measures
it beside the other forms.

Each function returns None where it does not apply. May import: unfolding, windows, jax.
"""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.lowerings.unfolding import (
    apart,
    computed,
    images_of,
    of_images,
    pixels_of,
    pixels_of_windows,
    reach_outside,
    rows_at,
    together,
    windows_of_pixels,
)

__all__ = ["forward", "input_gradient", "weight_gradient"]

AT_ONCE = 2_000_000  # elements of a span's columns: 8 MB, in the caches
MOST_OF_IMAGE = 16_000_000  # the same for images of which the windows cannot be divided
FEW_CHANNELS = 48  # of the output: the dot of fewer does not make up for what writing the columns costs
MOST_UNROLLED = 32  # gathers of one kernel: more make it slow to compile


class _Spans(NamedTuple):
    """How a batch is divided: one of both is 1."""

    images: int  # of a span
    parts: int  # of an image


def _spans(batch, positions, columns):
    """How to divide; None if there is nothing to divide, or images are too large that cannot be divided."""
    of_image = positions * columns
    if not batch * of_image:
        return None
    if of_image <= AT_ONCE:
        few = AT_ONCE // of_image
        return _Spans(next(images for images in range(min(few, batch), 0, -1) if batch % images == 0), 1)
    needed = -(-of_image // AT_ONCE)
    parts = next((parts for parts in range(needed, 4 * needed) if positions % parts == 0), 1)
    return _Spans(1, parts) if of_image // parts <= MOST_OF_IMAGE else None


def _loop(number, body, start):
    """`body` of 0, 1, ... as int32 and the carry."""
    return lax.fori_loop(0, number, lambda i, carry: body(lax.convert_element_type(i, np.int32), carry), start)


def _each_group(function, groups, *arrays):
    """`function` of each group's part of the arrays, which have the groups in dim 0."""
    if groups == 1:
        return function(*(array[0] for array in arrays))[None]
    return lax.map(lambda parts: function(*parts), arrays)


class _Unfolder:
    """The columns of each span: taps first, then channels."""

    def __init__(self, windows, spatial, spans):
        images, parts = spans
        self.parts, self.length = np.int32(parts), np.int32(images * math.prod(spatial))
        self.end = self.length if reach_outside(windows, spatial) else None
        places = pixels_of_windows(windows, spatial, computed)
        places = of_images(places, images, math.prod(spatial), math.prod(spatial))
        self.places = lax.optimization_barrier(places.reshape(-1))
        self.rows = images * math.prod(windows.output) // parts

    def columns(self, pixels, number):
        place, first = self.places, lax.mul(lax.div(number, self.parts), self.length)
        if self.parts > 1:
            length = len(place) // self.parts
            place = lax.dynamic_slice(place, [lax.mul(lax.rem(number, self.parts), length)], [length])
        rows = rows_at(pixels, place, self.end, first)
        return lax.optimization_barrier(rows).reshape(self.rows, -1)


def forward(input, weight, windows, groups):
    """Shapes: N x C x spatial, O x C/groups x kernel to N x O x output."""
    if groups == 1 and weight.shape[0] < FEW_CHANNELS and weight.ndim < 5:  # XLA's own is slow for three spatial dims
        return None
    spatial, taps, positions = input.shape[2:], math.prod(windows.kernel), math.prod(windows.output)
    batch, channels, of_group = input.shape[0], weight.shape[1], weight.shape[0] // groups
    spans = _spans(batch, positions, taps * channels)
    if spans is None:
        return None
    unfolder = _Unfolder(windows, spatial, spans)
    matrices = weight.reshape(groups, of_group, channels, taps).transpose(0, 3, 2, 1)
    matrices = lax.optimization_barrier(matrices.reshape(groups, taps * channels, of_group))
    pixels = pixels_of(apart(input, groups)).reshape(groups, -1, channels)

    def one(pixels, matrix):
        def span(number, out):
            rows = lax.dot(unfolder.columns(pixels, number), matrix)
            return lax.dynamic_update_slice(out, rows, (number * np.int32(unfolder.rows), np.int32(0)))

        number = batch // spans.images * spans.parts
        return _loop(number, span, jnp.zeros((batch * positions, of_group), input.dtype))

    out = _each_group(one, groups, pixels, matrices)
    return together(images_of(out.reshape(-1, of_group), groups * batch, windows.output), groups)


def input_gradient(grad_output, weight, windows, groups, spatial):
    """Shapes: N x O x output, O x C/groups x kernel to N x C x `spatial`."""
    out_channels, channels, *kernel = weight.shape
    if set(windows.stride) == {1} and out_channels // groups <= channels >= FEW_CHANNELS:  # fewer columns, no folding
        flipped = jnp.flip(weight, tuple(range(2, weight.ndim))).reshape(groups, -1, channels, *kernel)
        flipped = flipped.swapaxes(1, 2).reshape(groups * channels, out_channels // groups, *kernel)
        reach = [
            gap * (taps - 1) - pad for taps, pad, gap in zip(kernel, windows.padding, windows.dilation, strict=True)
        ]
        return forward(grad_output, flipped, windows._replace(padding=tuple(reach), output=tuple(spatial)), groups)
    return _folded(grad_output, weight, windows, groups, spatial)


def _folded(grad_output, weight, windows, groups, spatial):
    """`input_gradient` for any stride: each pixel is the sum of its columns in the windows that have it."""
    taps, positions, size = math.prod(windows.kernel), math.prod(windows.output), math.prod(spatial)
    batch, channels, of_group = grad_output.shape[0], weight.shape[1], weight.shape[0] // groups
    spans = _spans(batch, positions, taps * channels)
    if spans is None or positions * taps * channels > MOST_OF_IMAGE:
        return None
    images = spans.images  # whole ones: a pixel needs the windows of all parts
    places = windows_of_pixels(windows, spatial, computed) * np.int32(taps) + np.arange(taps, dtype=np.int32)
    places = of_images(places, images, positions * taps, positions * taps)
    table = lax.optimization_barrier(jnp.moveaxis(places, -1, 0).reshape(taps, -1))
    matrices = weight.reshape(groups, of_group, channels, taps).swapaxes(2, 3)
    matrices = lax.optimization_barrier(matrices.reshape(groups, of_group, taps * channels))
    pixels = pixels_of(apart(grad_output, groups)).reshape(groups, -1, of_group)

    def one(pixels, matrix):
        def span(number, out):
            rows = images * positions
            own = lax.dynamic_slice(pixels, (number * np.int32(rows), np.int32(0)), (rows, of_group))
            columns = lax.optimization_barrier(lax.dot(own, matrix).reshape(rows * taps, channels))
            folded = _sum_of_taps(columns, table)
            return lax.dynamic_update_slice(out, folded, (number * np.int32(images * size), np.int32(0)))

        return _loop(batch // images, span, jnp.zeros((batch * size, channels), grad_output.dtype))

    out = _each_group(one, groups, pixels, matrices)
    return together(images_of(out.reshape(-1, channels), groups * batch, spatial), groups)


def _sum_of_taps(columns, table):
    """The sum of the rows that each row of `table` names."""
    end = np.int32(columns.shape[0])
    if len(table) <= MOST_UNROLLED:
        return functools.reduce(lax.add, [rows_at(columns, place, end) for place in table])

    def add(number, total):
        place = lax.dynamic_index_in_dim(table, number, keepdims=False)
        return lax.add(total, rows_at(columns, place, end))

    return _loop(len(table), add, jnp.zeros((table.shape[1], columns.shape[1]), columns.dtype))


def weight_gradient(input, grad_output, windows, groups):
    """Shapes: N x C x spatial, N x O x output to O x C/groups x kernel."""
    taps, positions = math.prod(windows.kernel), math.prod(windows.output)
    batch, channels, of_group = input.shape[0], input.shape[1] // groups, grad_output.shape[1] // groups
    spans = _spans(batch, positions, taps * channels)
    if spans is None:
        return None
    images, parts = spans
    unfolder = _Unfolder(windows, input.shape[2:], spans)
    grads = grad_output.reshape(batch // images, images, groups, of_group, parts, positions // parts)
    grads = grads.transpose(2, 0, 4, 3, 1, 5).reshape(groups, -1, of_group, unfolder.rows)
    pixels = pixels_of(apart(input, groups))
    # Together, or XLA would keep the pixels of all layers in another order from the forward pass on.
    grads, pixels = lax.optimization_barrier((grads, pixels))

    def one(grads, pixels):
        def span(number, total):
            grad = lax.dynamic_index_in_dim(grads, number, keepdims=False)
            return lax.add(total, lax.dot(grad, unfolder.columns(pixels, number)))

        return _loop(len(grads), span, jnp.zeros((of_group, taps * channels), input.dtype))

    total = _each_group(one, groups, grads, pixels.reshape(groups, -1, channels))
    weight = total.reshape(groups * of_group, taps, channels).swapaxes(1, 2)
    return weight.reshape(groups * of_group, channels, *windows.kernel)
