"""Elementwise arithmetic, functions and activations, with their gradients.

Operands arrive promoted by torch's rules (see `registry.pointwise`); Python's operators broadcast them.
"""

import builtins
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlatrainer.backend.lowerings import arithmetic
from xlatrainer.backend.lowerings.checks import holds
from xlatrainer.backend.lowerings.fusion import materialized_images
from xlatrainer.backend.lowerings.registry import lowering, pointwise


def _is_bool(array):
    return jnp.result_type(array) == jnp.bool_


def _is_integral(array):
    return jnp.issubdtype(jnp.result_type(array), jnp.integer)


def _scaled(array, factor):
    """`factor * array`; the factor 1 that a schema has as its default costs nothing."""
    return array if isinstance(factor, int) and factor == 1 else arithmetic.mul(array, factor)


# arithmetic


@pointwise("add.Tensor", "add.Scalar")
def add(self, other, alpha=1):
    return jnp.logical_or(self, other) if _is_bool(self) else arithmetic.add(self, _scaled(other, alpha))


@pointwise("sub.Tensor", "sub.Scalar")
def sub(self, other, alpha=1):
    return arithmetic.sub(self, _scaled(other, alpha))


@pointwise("rsub.Tensor", "rsub.Scalar")
def rsub(self, other, alpha=1):
    return arithmetic.sub(other, _scaled(self, alpha))


@pointwise("mul.Tensor", "mul.Scalar")
def mul(self, other):
    return jnp.logical_and(self, other) if _is_bool(self) else arithmetic.mul(self, other)


@pointwise("div.Tensor", "div.Scalar", to="float")
def div(self, other):
    return arithmetic.div(self, other)


@pointwise("div.Tensor_mode", "div.Scalar_mode", to="operands")
def div_mode(self, other, rounding_mode=None):
    if rounding_mode is None:
        return jnp.true_divide(self, other)
    return _floor_divide(self, other) if rounding_mode == "floor" else _trunc_divide(self, other)


def _nonzero(divisor):
    """Integers have no result for a division by zero."""
    if _is_integral(divisor):
        holds(divisor != 0, RuntimeError, "ZeroDivisionError: integers cannot be divided by zero")


def _trunc_divide(self, other):
    _nonzero(other)
    if _is_integral(self):
        return lax.div(*jnp.broadcast_arrays(self, other))
    return jnp.trunc(self / other)


def _floor_divide(self, other):
    """Python's `//`; for floats as torch computes it: from the exact remainder, so that 1 // 0.1 is 9."""
    _nonzero(other)
    if _is_integral(self):
        return jnp.floor_divide(self, other)
    self, other = jnp.broadcast_arrays(self, other)
    remainder = lax.rem(self, other)
    quotient = (self - remainder) / other
    quotient = jnp.where((remainder != 0) & ((other < 0) != (remainder < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(quotient == 0, jnp.copysign(jnp.zeros_like(self), self / other), floored)
    return jnp.where(other == 0, self / other, floored)


@pointwise("floor_divide", "floor_divide.Scalar")
def floor_divide(self, other):
    return _floor_divide(self, other)


@pointwise("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def remainder(self, other):
    _nonzero(other)
    return jnp.remainder(self, other)


@pointwise("fmod.Tensor", "fmod.Scalar")
def fmod(self, other):
    _nonzero(other)
    return lax.rem(*jnp.broadcast_arrays(self, other))


@pointwise("pow.Tensor_Tensor", "pow.Scalar")
def pow(self, exponent):
    if _is_integral(self):
        return _integer_pow(self, exponent)
    return jnp.power(self, exponent)


def _integer_pow(self, exponent):
    """Negative exponents give what integer division of 1 by the power gives, as in torch."""
    positive = jnp.power(self, jnp.maximum(exponent, 0))
    inverse = jnp.where(self == 1, 1, jnp.where(self == -1, jnp.where(exponent % 2 == 0, 1, -1), 0))
    return jnp.where(exponent < 0, inverse.astype(positive.dtype), positive)


@pointwise("pow.Tensor_Scalar", static=("exponent",))
def pow_scalar(self, exponent):
    if isinstance(exponent, int | float) and exponent == int(exponent) and 0 <= exponent <= 64:
        return lax.integer_pow(self, int(exponent))
    if exponent == 0.5 and not _is_integral(self):
        return jnp.sqrt(self)
    return pow(self, jnp.asarray(exponent, jnp.result_type(self)))


@pointwise("addcmul")
def addcmul(self, tensor1, tensor2, value=1):
    return arithmetic.add(self, _scaled(arithmetic.mul(tensor1, tensor2), value))


@pointwise("addcdiv")
def addcdiv(self, tensor1, tensor2, value=1):
    return arithmetic.add(self, _scaled(arithmetic.div(tensor1, tensor2), value))


@pointwise("lerp.Tensor", "lerp.Scalar")
def lerp(self, end, weight):
    """Both forms of torch, so that weight 1 gives `end` exactly."""
    weight, way = jnp.asarray(weight, self.dtype), arithmetic.sub(end, self)
    from_start = arithmetic.add(self, arithmetic.mul(weight, way))
    from_end = arithmetic.sub(end, arithmetic.mul(way, arithmetic.sub(1, weight)))
    return arithmetic.where(arithmetic.less(lax.abs(weight), 0.5), from_start, from_end)


@pointwise("neg")
def neg(self):
    return lax.neg(self)


@pointwise("abs", to="operands")
def abs(self):
    return jnp.abs(self)


@pointwise("reciprocal", to="float")
def reciprocal(self):
    return 1 / self


@pointwise("_conj_physical")
def conj_physical(self):
    return jnp.conj(self)


@pointwise("hypot")
def hypot(self, other):
    return jnp.hypot(self, other)


@pointwise("atan2", to="float")
def atan2(self, other):
    return jnp.arctan2(self, other)


@pointwise("copysign.Tensor", "copysign.Scalar", to="float")
def copysign(self, other):
    return jnp.copysign(self, other)


@pointwise("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self", to="float")
def xlogy(self, other):
    product = jnp.where(self == 0, 0, self * jnp.log(other))
    return jnp.where(jnp.isnan(other), other, product)


@pointwise("logaddexp", to="float")
def logaddexp(self, other):
    return complex_logaddexp(self, other) if jnp.iscomplexobj(self) else jnp.logaddexp(self, other)


def complex_logaddexp(first, second):
    """The branch of the logarithm is torch's: near the operand with the greater real part."""
    greater = first.real >= second.real
    high, low = jnp.where(greater, first, second), jnp.where(greater, second, first)
    both_infinite = (high.real == low.real) & jnp.isinf(high.real)
    plain = jnp.where(high.real < 0, low, jnp.log(jnp.exp(low) + jnp.exp(high)))
    return jnp.where(both_infinite, plain, jnp.log1p(jnp.exp(low - high)) + high)


@pointwise("logaddexp2", to="float")
def logaddexp2(self, other):
    return jnp.logaddexp2(self, other)


@pointwise("gcd")
def gcd(self, other):
    return jnp.gcd(self, other)


@pointwise("lcm")
def lcm(self, other):
    return jnp.abs(jnp.lcm(self, other))


# functions of one operand


def _erfinv(x):
    """In float64: beside 1 XLA's float32 polynomial has lost digits that torch's result still has."""
    return lax.erf_inv(x.astype(jnp.float64)).astype(x.dtype)


_FLOAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": lax.cos,
    "cosh": jnp.cosh,
    "deg2rad": jnp.deg2rad,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": _erfinv,
    "exp": lax.exp,
    "exp2": jnp.exp2,
    "expm1": lax.expm1,
    "i0": jax.scipy.special.i0,
    "lgamma": jax.scipy.special.gammaln,
    "log": lax.log,
    "log10": jnp.log10,
    "log1p": lax.log1p,
    "log2": jnp.log2,
    "rad2deg": jnp.rad2deg,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sin": lax.sin,
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "special_entr": jax.scipy.special.entr,
    "special_i0e": jax.scipy.special.i0e,
    "special_i1": jax.scipy.special.i1,
    "special_i1e": jax.scipy.special.i1e,
    "special_ndtri": jax.scipy.special.ndtri,
    "special_log_ndtr": jax.scipy.special.log_ndtr,
    "sqrt": lax.sqrt,
    "tan": lax.tan,
    "tanh": lax.tanh,
}
for _name, _function in _FLOAT_FUNCTIONS.items():
    pointwise(_name, to="float")(_function)


def _rounding(function):
    return lambda self: self if _is_integral(self) else function(self)


for _name, _function in {"ceil": jnp.ceil, "floor": jnp.floor, "trunc": jnp.trunc, "round": jnp.round}.items():
    pointwise(_name)(_rounding(_function))


@pointwise("round.decimals", static=("decimals",))
def round_decimals(self, decimals=0):
    if decimals == 0:
        return jnp.round(self)
    scale = 10.0 ** builtins.abs(decimals)
    return jnp.round(self * scale) / scale if decimals > 0 else jnp.round(self / scale) * scale


@lowering("frexp.Tensor")
def frexp(self):
    """Subnormal numbers, which XLA's arithmetic takes for 0, are read as the integers that they are multiples of."""
    x = self.astype(jnp.float32) if self.dtype.itemsize == 2 else self
    bits = lax.bitcast_convert_type(x, jnp.int64 if x.dtype == jnp.float64 else jnp.int32)
    digits = jnp.finfo(x.dtype).nmant
    fraction = bits & (2**digits - 1)
    subnormal = (bits >> digits) & (2 ** jnp.finfo(x.dtype).nexp - 1) == 0
    mantissa, exponent = jnp.frexp(jnp.where(subnormal, fraction.astype(x.dtype), x))
    exponent += jnp.where(subnormal & (fraction != 0), jnp.finfo(x.dtype).minexp - digits, 0)
    finite = jnp.isfinite(x)
    mantissa = jnp.where(finite, jnp.copysign(mantissa, x), x)
    return mantissa.astype(self.dtype), jnp.where(finite, exponent, 0).astype(jnp.int32)


@pointwise("frac")
def frac(self):
    return self - jnp.trunc(self)


@pointwise("nan_to_num", static=("nan", "posinf", "neginf"))
def nan_to_num(self, nan=None, posinf=None, neginf=None):
    if _is_integral(self) or _is_bool(self):
        return self
    return jnp.nan_to_num(self, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@pointwise("logit", to="float", static=("eps",))
def logit(self, eps=None):
    # not `jnp.clip`: with eps above 0.5 the lower bound is the higher one, and counts
    clipped = self if eps is None else jnp.where(self < eps, eps, jnp.where(self > 1 - eps, 1 - eps, self))
    return jnp.log(clipped / (1 - clipped))


@pointwise("angle", to="float")
def angle(self):
    return jnp.angle(self) if jnp.iscomplexobj(self) else jnp.where(jnp.isnan(self), self, jnp.angle(self))


@pointwise("digamma", to="float")
def digamma(self):
    return jnp.where(self == 0, jnp.copysign(jnp.inf, -self), jax.scipy.special.digamma(self))


# activations


def _feature_maps(array):
    """Written to memory if it is of images: what comes behind (a convolution, statistics, a shortcut) reads it often.

    A shortcut would be computed again in each block behind it, from the results of all convolutions before it.
    """
    return materialized_images(array) if array.ndim in (4, 5) else array


@pointwise("relu")
def relu(self):
    return _feature_maps(lax.max(self, np.zeros((), self.dtype)))


@pointwise("threshold")
def threshold(self, threshold, value):
    return jnp.where(self <= threshold, value, self)


@pointwise("threshold_backward", to="result", static=("threshold",))
def threshold_backward(grad_output, self, threshold):
    return _feature_maps(arithmetic.where(arithmetic.less_equal(self, threshold), 0, grad_output))


@pointwise("leaky_relu")
def leaky_relu(self, negative_slope=0.01):
    return jnp.where(self > 0, self, self * negative_slope)


@pointwise("leaky_relu_backward", to="result")
def leaky_relu_backward(grad_output, self, negative_slope, self_is_result):
    return jnp.where(self > 0, grad_output, grad_output * negative_slope)


@pointwise("hardtanh", static=("min_val", "max_val"))
def hardtanh(self, min_val=-1, max_val=1):
    return jnp.clip(self, min_val, max_val)


@pointwise("hardtanh_backward", to="result", static=("min_val", "max_val"))
def hardtanh_backward(grad_output, self, min_val, max_val):
    return jnp.where((self <= min_val) | (self >= max_val), 0, grad_output)


@pointwise("hardsigmoid")
def hardsigmoid(self):
    return jnp.clip(self + 3, 0, 6) / 6


@pointwise("hardsigmoid_backward", to="result")
def hardsigmoid_backward(grad_output, self):
    return jnp.where((self > -3) & (self < 3), grad_output / 6, 0)


@pointwise("hardswish")
def hardswish(self):
    return self * jnp.clip(self + 3, 0, 6) / 6


@pointwise("hardswish_backward", to="result")
def hardswish_backward(grad_output, self):
    middle = grad_output * (self / 3 + 0.5)
    return jnp.where(self < -3, 0, jnp.where(self <= 3, middle, grad_output))


@pointwise("silu")
def silu(self):
    return self * jax.nn.sigmoid(self)


@pointwise("silu_backward", to="result")
def silu_backward(grad_output, self):
    gate = jax.nn.sigmoid(self)
    return grad_output * gate * (1 + self * (1 - gate))


@pointwise("mish")
def mish(self):
    return self * jnp.tanh(jax.nn.softplus(self))


@pointwise("mish_backward", to="result")
def mish_backward(grad_output, self):
    inner = jnp.tanh(jax.nn.softplus(self))
    return grad_output * (inner + self * jax.nn.sigmoid(self) * (1 - inner * inner))


@pointwise("softplus")
def softplus(self, beta=1, threshold=20):
    scaled = self * beta
    return jnp.where(scaled > threshold, self, jnp.log1p(jnp.exp(jnp.minimum(scaled, threshold))) / beta)


@pointwise("softplus_backward", to="result")
def softplus_backward(grad_output, self, beta, threshold):
    scaled = self * beta
    return jnp.where(scaled > threshold, grad_output, grad_output * jax.nn.sigmoid(scaled))


@pointwise("elu")
def elu(self, alpha=1, scale=1, input_scale=1):
    return jnp.where(self > 0, self * scale, jnp.expm1(jnp.minimum(self * input_scale, 0)) * alpha * scale)


@pointwise("elu_backward", to="result")
def elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    x = self_or_result
    negative = (
        input_scale * (x + alpha * scale) if is_result else input_scale * alpha * scale * jnp.exp(x * input_scale)
    )
    return grad_output * jnp.where(x <= 0, negative, scale)


@pointwise("softshrink")
def softshrink(self, lambd=0.5):
    return jnp.where(self > lambd, self - lambd, jnp.where(self < -lambd, self + lambd, self * 0))


@pointwise("hardshrink")
def hardshrink(self, lambd=0.5):
    return jnp.where((self >= -lambd) & (self <= lambd), 0, self)


@pointwise("softshrink_backward", "hardshrink_backward", to="result")
def shrink_backward(grad, self, lambd):
    return jnp.where((self >= -lambd) & (self <= lambd), 0, grad)


@pointwise("gelu")
def gelu(self, approximate="none"):
    if approximate == "tanh":
        return 0.5 * self * (1 + jnp.tanh(_GELU_SCALE * (self + 0.044715 * self**3)))
    return 0.5 * self * (1 + lax.erf(self * math.sqrt(0.5)))


_GELU_SCALE = math.sqrt(2 / math.pi)


@pointwise("gelu_backward", to="result")
def gelu_backward(grad_output, self, approximate="none"):
    if approximate == "tanh":
        inner = jnp.tanh(_GELU_SCALE * (self + 0.044715 * self**3))
        slope = _GELU_SCALE * (1 + 3 * 0.044715 * self * self)
        return grad_output * (0.5 * (1 + inner) + 0.5 * self * (1 - inner * inner) * slope)
    density = jnp.exp(-0.5 * self * self) / math.sqrt(2 * math.pi)
    return grad_output * (0.5 * (1 + lax.erf(self * math.sqrt(0.5))) + self * density)


@pointwise("sigmoid_backward", to="result")
def sigmoid_backward(grad_output, output):
    return grad_output * jnp.conj((1 - output) * output)


@pointwise("tanh_backward", to="result")
def tanh_backward(grad_output, output):
    return grad_output * jnp.conj(1 - output * output)


@pointwise("logit_backward", to="result", static=("eps",))
def logit_backward(grad_output, self, eps=None):
    low, high = (0.0, 1.0) if eps is None else (eps, 1 - eps)
    outside = jnp.nan if eps is None else 0.0
    return jnp.where((self < low) | (self > high), outside, grad_output / (self * (1 - self)))


@pointwise("_prelu_kernel")
def prelu_kernel(self, weight):
    return jnp.where(self > 0, self, self * weight)


@lowering("_prelu_kernel_backward")
def prelu_kernel_backward(grad_output, self, weight):
    positive = self > 0
    return jnp.where(positive, grad_output, weight * grad_output), jnp.where(positive, 0, self * grad_output)
