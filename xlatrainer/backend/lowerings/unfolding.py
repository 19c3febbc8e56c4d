"""Images as matrices of pixels, and which pixels a window has: what unfolded convolutions are made of.

Channels lie innermost inside only: arguments and results have torch's order. XLA turns the transposes into layouts, so
between a convolution and the next there is no copy. Matrices are behind barriers (see `fusion`), since fused into their
readers they would be computed once for each element read.

May import: arithmetic, fusion, jax.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.lowerings import arithmetic
from xlatrainer.backend.lowerings.fusion import channels_moved

__all__ = [
    "apart",
    "by_image",
    "channels_second",
    "computed",
    "images_of",
    "of_images",
    "pixels_of",
    "pixels_of_windows",
    "reach_outside",
    "rows_at",
    "rows_of",
    "together",
    "windows_of_pixels",
    "with_bias",
]


def pixels_of(array):
    """N x C x spatial to N * spatial x C, in memory."""
    return lax.optimization_barrier(channels_moved(array, 1, array.ndim - 1).reshape(-1, array.shape[1]))


def images_of(pixels, batch, spatial):
    """The inverse of `pixels_of`, of a matrix that is then in memory."""
    return channels_second(lax.optimization_barrier(pixels), batch, spatial, pixels.shape[1])


def channels_second(pixels, batch, spatial, channels):
    images = pixels.reshape(batch, *spatial, channels)
    return channels_moved(images, images.ndim - 1, 1)


def with_bias(images, bias):
    """N x C x spatial with a number added to each channel; None: as they are."""
    return images if bias is None else images + bias.reshape((1, -1) + (1,) * (images.ndim - 2))


def by_image(rows):
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
    where = jnp.where if isinstance(flat, jax.Array) else np.where
    return where(inside, flat, outside)


def _constants(places):
    return [along.astype(np.int32) for along in places]


def computed(places):
    """Places along each dim that XLA does not see: it computes the table at each run, instead of keeping a constant."""
    return lax.optimization_barrier([jnp.asarray(along) for along in _constants(places)])


def pixels_of_windows(windows, spatial, given=_constants):
    """For each window of an image and each of its taps the pixel; one too many for the padding.

    `given`: `computed` for an array of the program.
    """
    places = []
    for size, kernel, step, pad, gap, length in zip(spatial, *windows, strict=True):
        along = np.arange(length)[:, None] * step + np.arange(kernel) * gap - pad
        places.append(np.where(along < size, along, -1))
    return _flat(given(places), spatial, math.prod(spatial)).reshape(-1, math.prod(windows.kernel))


def windows_of_pixels(windows, spatial, given=_constants):
    """For each pixel of an image and each tap the window that has the pixel there; one too many where there is none."""
    places = []
    for size, kernel, step, pad, gap, length in zip(spatial, *windows, strict=True):
        start = np.arange(size)[:, None] - np.arange(kernel) * gap + pad
        places.append(np.where((start % step == 0) & (start < length * step), start // step, -1))
    return _flat(given(places), windows.output, math.prod(windows.output)).reshape(-1, math.prod(windows.kernel))


def reach_outside(windows, spatial):
    """Whether any window has a tap in the padding."""
    return any(
        pad > 0 or (length - 1) * step + gap * (kernel - 1) - pad >= size
        for size, kernel, step, pad, gap, length in zip(spatial, *windows, strict=True)
    )


def rows_of(matrix, batch, places):
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


def rows_at(matrix, place, end, first=None):
    """The rows of `matrix` that `place` names, behind row `first`; zeros for places from `end` on, if that is given."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    index = place if first is None else lax.add(place, lax.broadcast_in_dim(first, place.shape, ()))
    rows = lax.gather(matrix, lax.expand_dims(index, (1,)), numbers, (1, matrix.shape[1]), mode="clip")
    if end is None:
        return rows
    return arithmetic.where(lax.broadcast_in_dim(arithmetic.less(place, end), rows.shape, (0,)), rows, 0)


def of_images(table, images, size, end):
    """Places of one image as those of several, of `size` rows each; `end` and more is outside of all."""
    if images == 1:
        return table
    starts = lax.mul(lax.iota(np.int32, images), np.int32(size))
    starts = starts.reshape(images, *[1] * table.ndim)
    return jnp.where(table[None] < end, table[None] + starts, images * end)


def apart(array, groups):
    """N x C x spatial to groups * N x C/groups x spatial: the groups of channels are images of their own."""
    if groups == 1:
        return array
    batch, channels, *spatial = array.shape
    parts = array.reshape(batch, groups, channels // groups, *spatial)
    return parts.swapaxes(0, 1).reshape(groups * batch, channels // groups, *spatial)


def together(array, groups):
    """The inverse of `apart`."""
    if groups == 1:
        return array
    images, channels, *spatial = array.shape
    parts = array.reshape(groups, images // groups, channels, *spatial).swapaxes(0, 1)
    return parts.reshape(images // groups, groups * channels, *spatial)
