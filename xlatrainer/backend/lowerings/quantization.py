"""Fake quantization: floats rounded to what a quantized type could hold. The mask says which were in its range."""

import jax.numpy as jnp

from xlatrainer.backend.lowerings.registry import lowering


def _fake_quantized(self, scale, zero_point, quant_min, quant_max):
    steps = jnp.round(self.astype(jnp.float32) * (1 / scale) + zero_point)
    inside = (steps >= quant_min) & (steps <= quant_max)
    quantized = (jnp.clip(steps, quant_min, quant_max) - zero_point) * scale
    return quantized.astype(self.dtype), inside


@lowering("fake_quantize_per_tensor_affine_cachemask", static=("zero_point",))
def fake_quantize_per_tensor_affine(self, scale, zero_point, quant_min, quant_max):
    return _fake_quantized(self, jnp.asarray(scale, jnp.float32), zero_point, quant_min, quant_max)


@lowering("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def fake_quantize_per_tensor_affine_tensor_qparams(self, scale, zero_point, fake_quant_enabled, quant_min, quant_max):
    quantized, inside = _fake_quantized(self, scale.reshape(()), zero_point.reshape(()), quant_min, quant_max)
    enabled = fake_quant_enabled.reshape(()) != 0
    return jnp.where(enabled, quantized, self), inside | ~enabled


@lowering("fake_quantize_per_channel_affine_cachemask")
def fake_quantize_per_channel_affine(self, scale, zero_point, axis, quant_min, quant_max):
    shape = [-1 if d == axis % self.ndim else 1 for d in range(self.ndim)]
    return _fake_quantized(self, scale.reshape(shape), zero_point.reshape(shape), quant_min, quant_max)


# with a scale and zero point that are learned


def _learned(self, scale, zero_point, quant_min, quant_max):
    zero = jnp.clip(jnp.round(zero_point), quant_min, quant_max)
    return _fake_quantized(self, scale, zero, quant_min, quant_max)[0]


def _learned_gradients(grad, self, scale, zero, quant_min, quant_max, grad_factor, kept):
    """Gradients of the input, and of scale and zero point, added up over all dims but the one that is `kept`.

    Source: Esser et al., Learned Step Size Quantization (2020).
    """
    steps = jnp.round(self * (1 / scale) + zero)
    inside = (steps >= quant_min) & (steps <= quant_max)
    error = ((steps - zero) * scale - self) / scale
    by_scale = jnp.where(inside, error, jnp.clip(steps, quant_min, quant_max) - zero)
    by_zero = jnp.where(inside, 0, -scale)
    axes = tuple(d for d in range(self.ndim) if d != kept)
    sums = (jnp.sum(grad * change * grad_factor, axes) for change in (by_scale, by_zero))
    return jnp.where(inside, grad, 0), *sums


@lowering("_fake_quantize_learnable_per_tensor_affine")
def fake_quantize_learnable_per_tensor_affine(self, scale, zero_point, quant_min, quant_max, grad_factor=1.0):
    return _learned(self, scale.reshape(-1)[0], zero_point.reshape(-1)[0], quant_min, quant_max)


@lowering("_fake_quantize_learnable_per_channel_affine")
def fake_quantize_learnable_per_channel_affine(self, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0):
    shape = [-1 if d == axis % self.ndim else 1 for d in range(self.ndim)]
    return _learned(self, scale.reshape(shape), zero_point.reshape(shape), quant_min, quant_max)


@lowering("_fake_quantize_learnable_per_tensor_affine_backward")
def fake_quantize_learnable_per_tensor_affine_backward(
    grad, self, scale, zero_point, quant_min, quant_max, grad_factor=1.0
):
    """Here torch takes another whole number near the zero point than anywhere else."""
    zero = jnp.clip(jnp.trunc(zero_point.reshape(-1)[0] + 0.5), quant_min, quant_max)
    scale = scale.reshape(-1)[0]
    by_input, *sums = _learned_gradients(grad, self, scale, zero, quant_min, quant_max, grad_factor, None)
    return by_input, *(total.reshape(1) for total in sums)


@lowering("_fake_quantize_learnable_per_channel_affine_backward")
def fake_quantize_learnable_per_channel_affine_backward(
    grad, self, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0
):
    axis %= self.ndim
    shape = [-1 if d == axis else 1 for d in range(self.ndim)]
    zero = jnp.clip(jnp.round(zero_point.reshape(shape)), quant_min, quant_max)
    return _learned_gradients(grad, self, scale.reshape(shape), zero, quant_min, quant_max, grad_factor, axis)
