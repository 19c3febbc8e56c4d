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
