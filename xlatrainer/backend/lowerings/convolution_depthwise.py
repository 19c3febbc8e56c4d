"""Convolutions with one channel a group, in the forms that XLA's CPU backend runs and compiles fastest.

Padding is written to memory first: else every tap (position in the window) of a kernel checks bounds. Channels lie
innermost, so that loops over them are vectorized, unless they are few; here they are the last dim then, since XLA's
loops follow the order of dims. The result, and the gradient of the input, is then one kernel with a term for each tap.
The gradient of the weight gathers the pixels of all taps at once and sums some of them in the same kernel, the rest in
another; a sum for each tap would be two kernels for each tap.

Arguments and results have torch's order: `convolution_cpu` says why that costs nothing.

May import: fusion, windows, jax.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.lowerings import fusion
from xlatrainer.backend.lowerings.fusion import channels_moved
from xlatrainer.backend.lowerings.windows import Windows

__all__ = ["forward", "input_gradient", "weight_gradient"]

FEWEST_TERMS, MOST_TERMS = 8, 16  # that the kernel which gathers adds up: fewer leave more to write, more to compile


def _are_inner(array):
    return array.shape[1] >= fusion.FEW_CHANNELS


def _dims(inner, batch, channels, spatial):
    """One value for each dim of N x spatial x C if channels are `inner`, of N x C x spatial if not."""
    return [batch, *spatial, channels] if inner else [batch, channels, *spatial]


def _in_memory(array, inner):
    """`array`, written to memory; if its channels are inner, as a matrix, of which XLA chooses no other order."""
    if not inner:
        return lax.optimization_barrier(array)
    return lax.optimization_barrier(array.reshape(-1, array.shape[-1])).reshape(array.shape)


def _images(array, inner):
    """N x C x spatial in memory, in the order that `_dims` says."""
    return _in_memory(channels_moved(array, 1, array.ndim - 1) if inner else array, inner)


def _taps(weight):
    """O x 1 x kernel to taps x O, in memory: as a vector, since XLA would leave the order to that of the weight."""
    taps = weight.reshape(weight.shape[0], -1).T
    return lax.optimization_barrier(taps.reshape(-1)).reshape(taps.shape)


def _padded(images, config, inner):
    """`images` in memory with zeros around them and, for the third number of a spatial dim, between their pixels."""
    config = _dims(inner, (0, 0, 0), (0, 0, 0), config)
    return _in_memory(lax.pad(images, jnp.zeros((), images.dtype), config), inner)


def _around(spatial, windows):
    """The padding with which every window lies inside."""
    config = []
    for size, kernel, step, pad, gap, length in zip(spatial, *windows, strict=True):
        needed = (length - 1) * step + gap * (kernel - 1) + 1
        config.append((pad, max(needed - size - pad, 0), 0))
    return config


def _sums(padded, windows, taps, inner, bias=None):
    """N x O x output: for each window the sum of its pixels, each times its row of `taps`, and of the `bias`."""
    batch, channels = padded.shape[0], taps.shape[1]
    reach = [(length - 1) * step + 1 for length, step in zip(windows.output, windows.stride, strict=True)]
    strides = _dims(inner, 1, 1, windows.stride)
    total = None
    for number, offset in enumerate(windows.offsets()):
        first = [place * gap for place, gap in zip(offset, windows.dilation, strict=True)]
        ends = [start + length for start, length in zip(first, reach, strict=True)]
        pixels = lax.slice(padded, _dims(inner, 0, 0, first), _dims(inner, batch, channels, ends), strides)
        tap = lax.index_in_dim(taps, number, keepdims=False)
        term = lax.mul(pixels, lax.broadcast_in_dim(tap, pixels.shape, (pixels.ndim - 1 if inner else 1,)))
        total = term if total is None else lax.add(total, term)
    if bias is not None:
        total = lax.add(total, lax.broadcast_in_dim(bias, total.shape, (total.ndim - 1 if inner else 1,)))
    total = _in_memory(total, inner)
    return channels_moved(total, total.ndim - 1, 1) if inner else total


def forward(input, weight, windows, bias=None):
    """Shapes: N x C x spatial, O x 1 x kernel, O to N x O x output; O is a multiple of C."""
    inner = _are_inner(input)
    images = _images(input, inner)
    repeats = weight.shape[0] // input.shape[1]
    if repeats > 1:
        images = jnp.repeat(images, repeats, images.ndim - 1 if inner else 1)
    return _sums(_padded(images, _around(input.shape[2:], windows), inner), windows, _taps(weight), inner, bias)


def input_gradient(grad_output, weight, windows, spatial):
    """Shapes: N x C x output, C x 1 x kernel to N x C x `spatial`.

    The sums of windows in the other direction over the gradient, with zeros for the pixels that a stride leaves out.
    """
    inner = _are_inner(grad_output)
    config = []
    for size, kernel, step, pad, gap, length in zip(spatial, *windows, strict=True):
        config.append((gap * (kernel - 1) - pad, size + pad - ((length - 1) * step + 1), step - 1))
    padded = _padded(_images(grad_output, inner), config, inner)
    ones, nothing = (1,) * len(spatial), (0,) * len(spatial)
    backwards = Windows(windows.kernel, ones, nothing, windows.dilation, tuple(spatial))
    return _sums(padded, backwards, _taps(lax.rev(weight, range(2, weight.ndim))), inner)


def weight_gradient(input, grad_output, windows):
    """Shapes: N x C x spatial, N x C x output to C x 1 x kernel."""
    batch, channels = input.shape[:2]
    if grad_output.size == 0:
        return jnp.zeros((channels, 1, *windows.kernel), input.dtype)
    if not _are_inner(input) and batch > 1:  # the channels of all images lie innermost together
        apart = (array.reshape(1, batch * channels, *array.shape[2:]) for array in (input, grad_output))
        return jnp.sum(weight_gradient(*apart, windows).reshape(batch, channels, 1, *windows.kernel), 0)
    # Together, or XLA would take what was padded for the forward pass, and keep that of all layers in memory until now.
    images = [channels_moved(array, 1, array.ndim - 1) for array in (input, grad_output)]
    matrices = lax.optimization_barrier([image.reshape(-1, channels) for image in images])
    padded = _padded(matrices[0].reshape(images[0].shape), _around(input.shape[2:], windows), True)
    taps = _places(padded.shape[1:-1], windows.kernel, windows.dilation)
    starts = _places(padded.shape[1:-1], windows.output, windows.stride)
    rows, grad = padded.reshape(batch, -1, channels), matrices[1].reshape(batch, -1, channels)
    terms = _terms(starts.size)
    whole = starts.size - starts.size % terms
    total = _products(rows, grad[:, :whole], taps, starts[:whole], terms)
    if whole < starts.size:
        total = lax.add(total, _products(rows, grad[:, whole:], taps, starts[whole:], starts.size - whole))
    return total.T.reshape(channels, 1, *windows.kernel)


def _terms(count):
    """How many of `count` products are added up at once: all those of a row if possible."""
    even = (terms for terms in range(MOST_TERMS, FEWEST_TERMS - 1, -1) if count % terms == 0)
    return next(even, min(count, MOST_TERMS))


def _places(sizes, counts, steps):
    """Flat places in an array of `sizes` of a grid with so many points along each dim, so far from each other."""
    flat = np.zeros((), np.int32)
    for size, count, step in zip(sizes, counts, steps, strict=True):
        flat = flat[..., None] * np.int32(size) + np.arange(count, dtype=np.int32) * np.int32(step)
    return flat.reshape(-1)


def _products(rows, grad, taps, starts, terms):
    """The sum over images and windows of the gradient times the pixel at each tap. Shape: taps x channels.

    `rows` (images x pixels x channels) has a window's pixels at its place in `starts` plus those in `taps`.
    """
    batch, size, channels = rows.shape
    shape = (taps.size, batch, starts.size // terms)
    grad = grad.reshape(batch, -1, terms, channels)
    table = lax.optimization_barrier(jnp.asarray(starts.reshape(-1, terms).T))
    base = np.arange(batch, dtype=np.int32) * np.int32(size) + taps[:, None]
    base = lax.broadcast_in_dim(lax.optimization_barrier(jnp.asarray(base)), shape, (0, 1))
    numbers = lax.GatherDimensionNumbers(offset_dims=(3,), collapsed_slice_dims=(0,), start_index_map=(0,))
    rows, total = rows.reshape(-1, channels), None
    for number in range(terms):
        start = lax.broadcast_in_dim(lax.index_in_dim(table, number, keepdims=False), shape, (2,))
        places = lax.expand_dims(lax.add(base, start), (3,))
        pixels = lax.gather(rows, places, numbers, (1, channels), mode="clip")
        factor = lax.index_in_dim(grad, number, 2, keepdims=False)
        term = lax.mul(pixels, lax.broadcast_in_dim(factor, pixels.shape, (1, 2, 3)))
        total = term if total is None else lax.add(total, term)
    sums = lax.optimization_barrier(total.reshape(-1, channels))
    return lax.reduce_sum(sums.reshape(taps.size, -1, channels), (1,))
