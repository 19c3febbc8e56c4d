"""Upsampling of images (and lines, and volumes): `interpolate` and its gradients.

Along each dim, linear and cubic interpolation is a matrix that is known when the program is compiled: a product with it
is what hardware does best, and its transpose is the gradient. Nearest neighbours are taken: a product would spread NaN.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.dtypes import compute_dtype, from_numpy
from xlatrainer.backend.lowerings.registry import lowering

_SCALES = ("scales", "scales_d", "scales_h", "scales_w")
CUBIC = -0.75  # torch's coefficient of cubic convolution


# In all that follows `real` is the type that places are computed in, since a place decides between two neighbours: that
# of torch's kernels, float64 for images of float64 and float32 for all others.


def _step(size, length, scale, align_corners, real):
    """Input elements to one output element."""
    if align_corners:
        return real((size - 1) / (length - 1)) if length > 1 else real(0)
    return real(1 / scale if scale else size / length)


def _nearest(size, length, scale, exact, real):
    """For each output the input that it shows."""
    places = np.arange(length, dtype=real) + real(0.5 if exact else 0)
    return np.minimum((places * _step(size, length, scale, False, real)).astype(np.int64), size - 1)


def _linear(size, length, scale, align_corners, real):
    """Matrix of linear interpolation, outputs by inputs."""
    step = _step(size, length, scale, align_corners, real)
    places = np.arange(length, dtype=real)
    places = places * step if align_corners else np.maximum((places + real(0.5)) * step - real(0.5), 0)
    first = np.minimum(places.astype(np.int64), size - 1)
    share = np.clip(places - first, 0, 1)
    return _matrix(size, [(first, 1 - share), (np.minimum(first + 1, size - 1), share)])


def _cubic(size, length, scale, align_corners, real):
    """Matrix of cubic convolution over four inputs, those beyond the border taken from the border."""
    step = _step(size, length, scale, align_corners, real)
    places = np.arange(length, dtype=real)
    places = places * step if align_corners else (places + real(0.5)) * step - real(0.5)
    first = np.floor(places)
    share = (places - first).astype(np.float64)
    taps = []
    for offset in (-1, 0, 1, 2):
        distance = np.abs(share - offset)
        near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
        far = ((distance - 5) * distance + 8) * distance * CUBIC - 4 * CUBIC
        taps.append((np.clip(first.astype(np.int64) + offset, 0, size - 1), np.where(distance <= 1, near, far)))
    return _matrix(size, taps)


def _antialiased(support, kernel):
    """Makes matrices of a filter that is stretched when the image shrinks, so that every input counts."""

    def make(size, length, scale, align_corners, real):
        step = float(_step(size, length, scale, align_corners, real))
        stretch = max(step, 1.0)
        center = step * (np.arange(length) + 0.5)
        reach = support * stretch
        first = np.maximum((center - reach + 0.5).astype(np.int64), 0)
        last = np.minimum((center + reach + 0.5).astype(np.int64), size)
        places = np.arange(size)
        weights = kernel(np.abs(places - center[:, None] + 0.5) / stretch)
        weights = np.where((places >= first[:, None]) & (places < last[:, None]), weights, 0)
        return weights / weights.sum(1, keepdims=True)

    return make


def _triangle(distance):
    return np.maximum(1 - distance, 0)


def _keys(distance):
    """The cubic of PIL, with a coefficient of -1/2."""
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = -0.5 * (((distance - 5) * distance + 8) * distance - 4)
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


def _lanczos(distance):
    return np.where(distance < 3, np.sinc(distance) * np.sinc(distance / 3), 0)


def _matrix(size, taps):
    matrix = np.zeros((len(taps[0][0]), size))
    for places, weights in taps:
        np.add.at(matrix, (np.arange(len(places)), places), weights)
    return matrix


def _multiplied(array, matrices):
    """The product of each of the last dims with its matrix (outputs by inputs)."""
    dtype = compute_dtype(from_numpy(array.dtype))
    result = array.astype(dtype)
    for axis, matrix in enumerate(matrices, start=array.ndim - len(matrices)):
        weights = jnp.asarray(matrix, dtype)
        product = jnp.tensordot(result, weights, ((axis,), (1,)), precision=lax.Precision.HIGHEST)
        result = jnp.moveaxis(product, -1, axis)
    return result.astype(array.dtype)


def _by_dim(make, sizes, lengths, scales, option, dtype):
    scales = scales or [None] * len(sizes)
    real = np.float64 if dtype == np.float64 else np.float32
    return [make(*dim, option, real) for dim in zip(sizes, lengths, scales, strict=True)]


def _register_nearest(name, exact):
    @lowering(name, static=_SCALES)
    def forward(self, output_size, *scales):
        chosen = _by_dim(_nearest, self.shape[2:], output_size, scales, exact, self.dtype)
        for axis, places in enumerate(chosen, start=2):
            self = jnp.take(self, places, axis=axis)
        return self

    @lowering(f"{name}_backward", static=_SCALES)
    def backward(grad_output, output_size, input_size, *scales):
        chosen = _by_dim(_nearest, input_size[2:], output_size, scales, exact, grad_output.dtype)
        return _multiplied(
            grad_output, [np.eye(size)[:, places] for size, places in zip(input_size[2:], chosen, strict=True)]
        )


def _register_smooth(name, make):
    @lowering(name, static=_SCALES)
    def forward(self, output_size, align_corners, *scales):
        return _multiplied(self, _by_dim(make, self.shape[2:], output_size, scales, align_corners, self.dtype))

    @lowering(f"{name}_backward", static=_SCALES)
    def backward(grad_output, output_size, input_size, align_corners, *scales):
        matrices = _by_dim(make, input_size[2:], output_size, scales, align_corners, grad_output.dtype)
        return _multiplied(grad_output, [matrix.T for matrix in matrices])


for _rank, _kind in ((1, "linear"), (2, "bilinear"), (3, "trilinear")):
    _register_nearest(f"upsample_nearest{_rank}d", exact=False)
    _register_nearest(f"_upsample_nearest_exact{_rank}d", exact=True)
    _register_smooth(f"upsample_{_kind}{_rank}d", _linear)
_register_smooth("upsample_bicubic2d", _cubic)
_register_smooth("_upsample_bilinear2d_aa", _antialiased(1, _triangle))
_register_smooth("_upsample_bicubic2d_aa", _antialiased(2, _keys))
_register_smooth("_upsample_lanczos2d_aa", _antialiased(3, _lanczos))
