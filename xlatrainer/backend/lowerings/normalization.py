"""Batch, layer, group and RMS normalization with gradients, and `renorm`. Statistics of half types are float32."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.lowerings import leading_axes
from xlatrainer.backend.lowerings.arithmetic import add, converted, mul, sub
from xlatrainer.backend.lowerings.fusion import materialized, materialized_images
from xlatrainer.backend.lowerings.registry import lowering


def _acc(array):
    """The dtype that statistics are kept in."""
    return jnp.float32 if array.dtype in (jnp.float16, jnp.bfloat16) else array.dtype


def _per_channel(vector, array):
    """`vector` as an array of the shape of `array`, along its channels."""
    return lax.broadcast_in_dim(vector, array.shape, (1,))


def _channel_sum(array):
    return lax.reduce_sum(array, [axis for axis in range(array.ndim) if axis != 1])


def _share(count, dtype):
    """What one of `count` elements has of their mean.

    XLA does not see the number: kernels that differ in it alone are one, which is compiled once.
    """
    return materialized(np.asarray(1 / max(count, 1), dtype))


# What is computed for each channel is written to memory here and there, lest XLA compute it within its readers in more
# than one way: of what is read in one way, the kernels of all batch norms of so many channels are the same.


def _batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    """Output, the batch's mean and 1/std if training (else they are empty), and the new running statistics."""
    acc = _acc(input)
    x = converted(input, acc)
    if training:
        count = input.size // max(input.shape[1], 1)
        mean = materialized(mul(_channel_sum(x), _share(count, acc)))
        centered = sub(x, _per_channel(mean, x))
        squares = _channel_sum(lax.square(centered))
        invstd = lax.rsqrt(add(mul(squares, _share(count, acc)), eps))
        if running_mean is not None:
            unbiased = materialized(mul(squares, _share(count - 1, acc)))
            running_mean = _moved(running_mean, mean, momentum)
            running_var = _moved(running_var, unbiased, momentum)
    else:
        mean, var = converted(running_mean, acc), converted(running_var, acc)
        invstd = lax.rsqrt(add(var, eps))
        centered = sub(x, _per_channel(mean, x))
    saved = (mean, invstd) if training else (jnp.zeros(0, acc), jnp.zeros(0, acc))
    scale = invstd if weight is None else mul(invstd, converted(weight, acc))
    out = mul(centered, _per_channel(scale, x))
    if bias is not None:
        out = add(out, _per_channel(converted(bias, acc), x))
    return converted(out, input.dtype), saved, running_mean, running_var


def _moved(running, new, momentum):
    momentum = converted(momentum, running.dtype)
    return add(mul(running, sub(1, momentum)), mul(converted(new, running.dtype), momentum))


@lowering("native_batch_norm", static=("eps",), mutates=("running_mean", "running_var"))
def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    out, saved, new_mean, new_var = _batch_norm(
        input, weight, bias, running_mean, running_var, training, jnp.asarray(momentum), eps
    )
    return (out, *saved, new_mean, new_var)


@lowering("_native_batch_norm_legit_functional", static=("eps",))
def native_batch_norm_legit(input, weight, bias, running_mean, running_var, training, momentum, eps):
    return native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)


@lowering("_native_batch_norm_legit.no_stats", static=("eps",))
def native_batch_norm_legit_no_stats(input, weight, bias, training, momentum, eps):
    return native_batch_norm(input, weight, bias, None, None, True, momentum, eps)[:3]


@lowering("_batch_norm_with_update_functional", static=("eps",))
def batch_norm_with_update(input, weight, bias, running_mean, running_var, momentum, eps):
    """`reserve` is of use to cuDNN only."""
    out, mean, invstd, *running = native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    return (out, mean, invstd, jnp.zeros(0, jnp.uint8), *running)


@lowering("batch_norm_backward", static=("eps",))
def batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask, reserve
):
    return native_batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )


@lowering("native_batch_norm_backward", static=("eps",))
def native_batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    acc = _acc(input)
    grad, x = converted(grad_out, acc), converted(input, acc)
    if train:
        mean, invstd = converted(save_mean, acc), converted(save_invstd, acc)
    else:
        mean, invstd = converted(running_mean, acc), lax.rsqrt(add(converted(running_var, acc), eps))
    # One after the other, or XLA centers in the forward pass already and keeps that of all layers until now.
    grad_bias, mean = materialized(_channel_sum(grad), mean)
    centered = sub(x, _per_channel(mean, x))
    grad_weight = materialized(mul(_channel_sum(mul(grad, centered)), invstd))
    scale = invstd if weight is None else mul(invstd, converted(weight, acc))
    if train:
        share = _share(input.size // max(input.shape[1], 1), acc)
        mean_grad, along = materialized(mul(grad_bias, share), mul(grad_weight, share))
        grad = sub(sub(grad, _per_channel(mean_grad, x)), mul(centered, _per_channel(mul(along, invstd), x)))
    grad_input = mul(grad, _per_channel(scale, x))
    if x.ndim in (4, 5):  # or each of many readers, such as those of the parts of a concatenation, computes it anew
        grad_input = materialized_images(grad_input)
    kind = input.dtype if weight is None else weight.dtype
    # torch's shape inference counts on the gradient of the input always; XLA drops what nobody reads.
    return (
        converted(grad_input, input.dtype),
        converted(grad_weight, kind) if output_mask[1] else None,
        converted(grad_bias, kind) if output_mask[2] else None,
    )


# Results of layer norm are read by several products, and the gradient's also by the residual branch. On the CPU each of
# them would compute the normalization again: a transformer's step went from 148 to 139 ms with this and `strided.read`.


@lowering("native_layer_norm", static=("eps",))
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    acc = _acc(input)
    x = input.astype(acc)
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    mean = jnp.mean(x, axes, keepdims=True)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x - mean), axes, keepdims=True) + eps)
    out = (x - mean) * rstd
    if weight is not None:
        out = out * weight.astype(acc)
    if bias is not None:
        out = out + bias.astype(acc)
    return materialized(out.astype(input.dtype)), mean, rstd


@lowering("native_layer_norm_backward")
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    acc = _acc(input)
    grad, x = grad_out.astype(acc), input.astype(acc)
    first = input.ndim - len(normalized_shape)
    inner = tuple(range(first, input.ndim))
    outer = tuple(range(first))
    normalized = (x - mean) * rstd
    scaled = grad if weight is None else grad * weight.astype(acc)
    projection = jnp.mean(scaled * normalized, inner, keepdims=True)
    grad_input = (scaled - jnp.mean(scaled, inner, keepdims=True) - normalized * projection) * rstd
    grad_weight = leading_axes.total(grad * normalized, outer).astype(input.dtype if weight is None else weight.dtype)
    grad_bias = leading_axes.total(grad, outer).astype(input.dtype if bias is None else bias.dtype)
    return (
        materialized(grad_input.astype(input.dtype)) if output_mask[0] else None,
        grad_weight if output_mask[1] and weight is not None else None,
        grad_bias if output_mask[2] and bias is not None else None,
    )


def _grouped(array, N, group):
    return array.reshape(N, group, -1)


@lowering("native_group_norm", static=("eps",))
def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    acc = _acc(input)
    x = _grouped(input.astype(acc), N, group)
    mean = jnp.mean(x, 2)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x - mean[..., None]), 2) + eps)
    out = ((x - mean[..., None]) * rstd[..., None]).reshape(N, C, HxW)
    if weight is not None:
        out = out * weight.astype(acc)[:, None]
    if bias is not None:
        out = out + bias.astype(acc)[:, None]
    return out.reshape(input.shape).astype(input.dtype), mean.astype(input.dtype), rstd.astype(input.dtype)


@lowering("native_group_norm_backward")
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    acc = _acc(input)
    grad = grad_out.astype(acc).reshape(N, C, HxW)
    normalized = (_grouped(input.astype(acc), N, group) - mean.astype(acc)[..., None]) * rstd.astype(acc)[..., None]
    normalized = normalized.reshape(N, C, HxW)
    scaled = grad if weight is None else grad * weight.astype(acc)[:, None]
    scaled, inner = _grouped(scaled, N, group), _grouped(normalized, N, group)
    projection = jnp.mean(scaled * inner, 2, keepdims=True)
    grad_input = (scaled - jnp.mean(scaled, 2, keepdims=True) - inner * projection) * rstd.astype(acc)[..., None]
    return (
        grad_input.reshape(input.shape).astype(input.dtype) if output_mask[0] else None,
        jnp.sum(grad * normalized, (0, 2)).astype(input.dtype) if output_mask[1] else None,
        jnp.sum(grad, (0, 2)).astype(input.dtype) if output_mask[2] else None,
    )


def shortened(array, p, dim, longest):
    """Each slice along `dim` scaled down to the p-norm `longest` where it is longer."""
    axes = tuple(axis for axis in range(array.ndim) if axis != dim % array.ndim)
    size = jnp.abs(array.astype(_acc(array)))
    if p == math.inf:
        norm = jnp.max(size, axes, keepdims=True, initial=0)
    else:
        norm = jnp.sqrt(jnp.sum(size * size, axes, keepdims=True)) if p == 2 else _power_norm(size, p, axes)
    longest = jnp.asarray(longest).astype(norm.dtype)
    return (array * jnp.where(norm > longest, longest / (norm + 1e-7), 1)).astype(array.dtype)


def _power_norm(size, p, axes):
    return jnp.sum(size**p, axes, keepdims=True) ** (1 / p)


@lowering("renorm", static=("p",))
def renorm(self, p, dim, maxnorm):
    return shortened(self, p, dim, maxnorm)
