"""Rearrangements that are no views: they make a new tensor out of an old one's elements."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.dtypes import to_numpy
from xlatrainer.backend.lowerings import fusion
from xlatrainer.backend.lowerings.platforms import on_cpu_or_else
from xlatrainer.backend.lowerings.registry import lowering


@lowering("pixel_shuffle")
def pixel_shuffle(self, upscale_factor):
    *batch, channels, height, width = self.shape
    r = upscale_factor
    blocks = self.reshape(math.prod(batch), channels // (r * r), r, r, height, width)
    return blocks.transpose(0, 1, 4, 2, 5, 3).reshape(*batch, channels // (r * r), height * r, width * r)


@lowering("pixel_unshuffle")
def pixel_unshuffle(self, downscale_factor):
    *batch, channels, height, width = self.shape
    r = downscale_factor
    blocks = self.reshape(math.prod(batch), channels, height // r, r, width // r, r)
    return blocks.transpose(0, 1, 3, 5, 2, 4).reshape(*batch, channels * r * r, height // r, width // r)


@lowering("channel_shuffle")
def channel_shuffle(self, groups):
    batch, channels, *rest = self.shape
    return self.reshape(batch, groups, channels // groups, *rest).swapaxes(1, 2).reshape(self.shape)


def _patches(image, kernel_size, dilation, padding, stride):
    """[N, C, H, W] to [N, C * kh * kw, L]: every window of the image as a column."""
    batch, channels, height, width = image.shape
    (kh, kw), (dh, dw), (ph, pw), (sh, sw) = kernel_size, dilation, padding, stride
    out_h = (height + 2 * ph - dh * (kh - 1) - 1) // sh + 1
    out_w = (width + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    padded = jnp.pad(image, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    rows = jnp.arange(kh)[:, None] * dh + jnp.arange(out_h) * sh
    columns = jnp.arange(kw)[:, None] * dw + jnp.arange(out_w) * sw
    windows = padded[:, :, rows[:, None, :, None], columns[None, :, None, :]]
    return windows.reshape(batch, channels * kh * kw, out_h * out_w)


@lowering("im2col")
def im2col(self, kernel_size, dilation, padding, stride):
    image = self if self.ndim == 4 else self[None]
    columns = _patches(image, kernel_size, dilation, padding, stride)
    return columns if self.ndim == 4 else columns[0]


@lowering("col2im")
def col2im(self, output_size, kernel_size, dilation, padding, stride):
    """Adds overlapping windows up: the transpose of `im2col`."""
    columns = self if self.ndim == 3 else self[None]
    channels = columns.shape[1] // (kernel_size[0] * kernel_size[1])
    shape = jax.ShapeDtypeStruct((columns.shape[0], channels, *output_size), self.dtype)
    transpose = jax.linear_transpose(lambda image: _patches(image, kernel_size, dilation, padding, stride), shape)
    (image,) = transpose(columns)
    return image if self.ndim == 3 else image[0]


@lowering("repeat")
def repeat(self, repeats):
    return jnp.tile(self, repeats) if repeats else self


@lowering("flip")
def flip(self, dims):
    return jnp.flip(self, tuple(dims))


@lowering("roll")
def roll(self, shifts, dims=None):
    if not dims:
        return jnp.roll(self.reshape(-1), shifts[0]).reshape(self.shape)
    return jnp.roll(self, tuple(shifts), tuple(dims))


@lowering("rot90")
def rot90(self, k=1, dims=(0, 1)):
    return jnp.rot90(self, k, tuple(dims))


@lowering("cat", takes_specs=True)
def cat(tensors, dim=0, *, out_specs):
    """Empty one-dimensional tensors are skipped whatever the shape of the others, as torch always did."""
    dtype = to_numpy(out_specs[0].dtype)
    parts = [tensor.astype(dtype) for tensor in tensors if tensor.shape != (0,)]
    if not parts:
        return jnp.zeros(out_specs[0].shape, dtype)
    if len(parts) > 1 and parts[0].ndim in (4, 5) and dim % parts[0].ndim == 1:
        return on_cpu_or_else(_feature_maps_joined, lambda *parts: jnp.concatenate(parts, 1), *parts)
    return jnp.concatenate(parts, dim)


def _feature_maps_joined(*parts):
    """Joined along their channels, which lie innermost in memory if they are many, as convolutions have them.

    As matrices: of more dims XLA joins in torch's order, and transposes before and behind.
    """
    channels = sum(part.shape[1] for part in parts)
    if channels < fusion.FEW_CHANNELS:
        return lax.concatenate(parts, 1)
    inner = [fusion.channels_moved(part, 1, part.ndim - 1) for part in parts]
    shape = inner[0].shape[:-1]
    matrix = lax.concatenate([part.reshape(math.prod(shape), part.shape[-1]) for part in inner], 1)
    images = lax.optimization_barrier(matrix).reshape(*shape, channels)
    return fusion.channels_moved(images, images.ndim - 1, 1)


@lowering("stack", "_stack", takes_specs=True)
def stack(tensors, dim=0, *, out_specs):
    dtype = to_numpy(out_specs[0].dtype)
    return jnp.stack([tensor.astype(dtype) for tensor in tensors], dim)


@lowering("block_diag", takes_specs=True)
def block_diag(tensors, *, out_specs):
    dtype = to_numpy(out_specs[0].dtype)
    return jax.scipy.linalg.block_diag(*[jnp.atleast_2d(tensor).astype(dtype) for tensor in tensors])


# padding


@lowering("constant_pad_nd")
def constant_pad_nd(self, pad, value=0):
    """`pad` names the last dim first; negative amounts cut off."""
    config = [(0, 0, 0)] * (self.ndim - len(pad) // 2)
    config += [(pad[i], pad[i + 1], 0) for i in range(len(pad) - 2, -1, -2)]
    return lax.pad(self, jnp.asarray(value).astype(self.dtype), config)


def _padded(mode, self, padding):
    widths = [(0, 0)] * (self.ndim - len(padding) // 2)
    widths += [(padding[i], padding[i + 1]) for i in range(len(padding) - 2, -1, -2)]
    padded = jnp.pad(self, [(max(low, 0), max(high, 0)) for low, high in widths], mode=mode)
    cut = tuple(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(padded.shape, widths, strict=True))
    return padded[cut]


def _register_padding(name, mode):
    @lowering(name)
    def forward(self, padding):
        return _padded(mode, self, padding)

    @lowering(f"{name}_backward")
    def backward(grad_output, self, padding):
        shape = jax.ShapeDtypeStruct(self.shape, grad_output.dtype)
        return jax.linear_transpose(lambda x: _padded(mode, x, padding), shape)(grad_output)


for _rank in (1, 2, 3):
    _register_padding(f"reflection_pad{_rank}d", "reflect")
    _register_padding(f"replication_pad{_rank}d", "edge")


# gated linear unit: an activation that halves a dim


@lowering("glu")
def glu(self, dim=-1):
    value, gate = jnp.split(self, 2, dim)
    return value * jax.nn.sigmoid(gate)


@lowering("glu_backward")
def glu_backward(grad_output, self, dim):
    value, gate = jnp.split(self, 2, dim)
    opened = jax.nn.sigmoid(gate)
    return jnp.concatenate([grad_output * opened, grad_output * value * opened * (1 - opened)], dim)


@lowering("glu_jvp")
def glu_jvp(glu, x, dx, dim):
    opened = jax.nn.sigmoid(jnp.split(x, 2, dim)[1])
    change, gate_change = jnp.split(dx, 2, dim)
    return change * opened + glu * (1 - opened) * gate_change


@lowering("glu_backward_jvp")
def glu_backward_jvp(grad_x, grad_glu, x, dgrad_glu, dx, dim):
    return jax.jvp(lambda grad, array: glu_backward(grad, array, dim), (grad_glu, x), (dgrad_glu, dx))[1]


@lowering("narrow_copy", static=("start", "length"))
def narrow_copy(self, dim, start, length):
    size = self.shape[dim]
    start = start + size if start < 0 else start
    return lax.slice_in_dim(self, start, start + length, axis=dim)
