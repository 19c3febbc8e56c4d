"""Convolutions of 1 to 3 spatial dims, with groups, dilation and transposition, and their gradients."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.lowerings import convolution_cpu
from xlatrainer.backend.lowerings.partitioning import partitioned
from xlatrainer.backend.lowerings.platforms import on_cpu_or_else
from xlatrainer.backend.lowerings.registry import lowering
from xlatrainer.backend.lowerings.unfolding import with_bias
from xlatrainer.backend.lowerings.windows import per_dim


class Geometry(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def _numbers(rank):
    """Dimension numbers in torch's own order: batch, channels, spatial."""
    spatial = "DHW"[3 - rank :]
    return ("NC" + spatial, "OI" + spatial, "NC" + spatial)


def _convolve(input, weight, stride, padding, *, input_dilation=None, dilation=None, groups=1):
    """`padding` holds a pair for each spatial dim; half types are accumulated in float32."""
    return lax.conv_general_dilated(
        input,
        weight,
        stride,
        padding,
        lhs_dilation=input_dilation,
        rhs_dilation=dilation,
        dimension_numbers=_numbers(len(stride)),
        feature_group_count=groups,
        preferred_element_type=input.dtype,
    )


def _flipped(weight, groups):
    """The kernel of the transposed convolution: spatially reversed, input and output channels exchanged per group."""
    out_channels, in_per_group, *kernel = weight.shape
    weight = weight.reshape(groups, out_channels // groups, in_per_group, *kernel).swapaxes(1, 2)
    weight = weight.reshape(groups * in_per_group, out_channels // groups, *kernel)
    return jnp.flip(weight, tuple(range(2, weight.ndim)))


def input_gradient(grad_output, weight, geometry, spatial):
    """The gradient of a convolution from `spatial` sizes to those of `grad_output`; also the transposed convolution."""
    stride, padding, dilation, groups = geometry
    pads = []
    for size, length, kernel, step, pad, gap in zip(
        spatial, grad_output.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
    ):
        reach = gap * (kernel - 1)
        low = reach - pad
        pads.append((low, size + reach - low - ((length - 1) * step + 1)))
    ones = (1,) * len(stride)
    return _convolve(
        grad_output, _flipped(weight, groups), ones, pads, input_dilation=stride, dilation=dilation, groups=groups
    )


def forward(input, weight, geometry):
    stride, padding, dilation, groups = geometry
    return _convolve(input, weight, stride, [(p, p) for p in padding], dilation=dilation, groups=groups)


def weight_gradient(input, grad_output, geometry, kernel):
    """Correlates the input with the output's gradient: channels act as the batch, the batch is summed over."""
    stride, padding, dilation, groups = geometry
    rank = len(stride)
    pads = []
    for size, length, taps, step, pad, gap in zip(
        input.shape[2:], grad_output.shape[2:], kernel, stride, padding, dilation, strict=True
    ):
        needed = gap * (taps - 1) + step * (length - 1) + 1
        pads.append((pad, needed - size - pad))
    numbers = ("CN" + "DHW"[3 - rank :], "IO" + "DHW"[3 - rank :], "CN" + "DHW"[3 - rank :])
    return lax.conv_general_dilated(
        input,
        grad_output,
        dilation,
        pads,
        rhs_dilation=stride,
        dimension_numbers=numbers,
        batch_group_count=groups,
        preferred_element_type=input.dtype,
    )


def _best(native, on_cpu, *arrays):
    """`native`, or on the CPU what is faster there for these shapes. The third array, if there is one, is the bias."""
    if arrays[0].dtype not in (jnp.float32, jnp.float64):
        return native(*arrays)
    return on_cpu_or_else(partial(_fenced, native, on_cpu), native, *arrays)


def _fenced(native, on_cpu, *arrays):
    result = on_cpu(*arrays)
    if result is not None:
        return result
    operands = lax.optimization_barrier(arrays[:2])  # each is read many times: see `fusion`
    out = lax.optimization_barrier(native(*operands))
    return with_bias(out, *arrays[2:]) if len(arrays) > 2 else out


def _rule(rank, *operands):
    """A partitioning by the batch, "n": other dimensions of each of `operands` have letters of their own."""
    letters = iter("abcdefghijklmopqrstuvwxyz")
    return [operand + "".join(next(letters) for _ in range(rank + 2 - len(operand))) for operand in operands]


def _forward(input, weight, geometry, bias=None):
    def native(input, weight, bias=None):
        return with_bias(forward(input, weight, geometry), bias)

    def on_cpu(input, weight, bias=None):
        return convolution_cpu.forward(input, weight, geometry, bias)

    image, kernel, out = _rule(len(geometry.stride), "n", "", "n")
    best = partial(_best, native, on_cpu)
    if bias is None:
        return partitioned(best, f"{image},{kernel}->{out}", "n", input, weight)
    return partitioned(best, f"{image},{kernel},z->{out}", "n", input, weight, bias)


def _input_gradient(grad_output, weight, geometry, spatial):
    options = {"geometry": geometry, "spatial": tuple(spatial)}
    image, kernel, out = _rule(len(geometry.stride), "n", "", "n")
    best = partial(_best, partial(input_gradient, **options), partial(convolution_cpu.input_gradient, **options))
    return partitioned(best, f"{image},{kernel}->{out}", "n", grad_output, weight)


def _weight_gradient(input, grad_output, geometry, kernel, alone):
    options = {"geometry": geometry, "kernel": tuple(kernel)}
    image, of_output, out = _rule(len(geometry.stride), "n", "n", "")
    on_cpu = partial(convolution_cpu.weight_gradient, alone=alone, **options)
    best = partial(_best, partial(weight_gradient, **options), on_cpu)
    return partitioned(best, f"{image},{of_output}->{out}", f"n{out}", input, grad_output)


def _in_order(grad_input, grad_weight):
    """Both gradients, on the CPU as if each needed both.

    The gradient of the input reads the weight. Where an update of the weight need not wait for that, XLA copies every
    weight at the start of the program, since it may not write the new one over it.
    """
    if grad_input.dtype not in (jnp.float32, jnp.float64):
        return grad_input, grad_weight
    return on_cpu_or_else(convolution_cpu.in_order, lambda *gradients: gradients, grad_input, grad_weight)


def _output_size(input, weight, geometry, output_padding):
    return [
        (length - 1) * step - 2 * pad + gap * (kernel - 1) + extra + 1
        for length, kernel, step, pad, gap, extra in zip(
            input.shape[2:],
            weight.shape[2:],
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            output_padding,
            strict=True,
        )
    ]


@lowering("convolution", "convolution_overrideable")
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    rank = weight.ndim - 2
    unbatched = input.ndim == rank + 1
    if unbatched:
        input = input[None]
    geometry = Geometry(per_dim(stride, rank), per_dim(padding, rank), per_dim(dilation, rank), groups)
    if transposed:
        spatial = _output_size(input, weight, geometry, per_dim(output_padding, rank))
        out = with_bias(_input_gradient(input, weight, geometry, spatial), bias)
    else:
        out = _forward(input, weight, geometry, bias)
    return out[0] if unbatched else out


@lowering("convolution_backward")
def convolution_backward(
    grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    rank = weight.ndim - 2
    geometry = Geometry(per_dim(stride, rank), per_dim(padding, rank), per_dim(dilation, rank), groups)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            # output_padding may make room for windows that belong to no input
            grad_input = _forward(grad_output, weight, geometry)
            grad_input = grad_input[(slice(None), slice(None), *(slice(size) for size in input.shape[2:]))]
        else:
            grad_input = _input_gradient(grad_output, weight, geometry, input.shape[2:])
    if output_mask[1]:
        large, small = (grad_output, input) if transposed else (input, grad_output)
        grad_weight = _weight_gradient(large, small, geometry, weight.shape[2:], alone=not output_mask[0])
        if grad_input is not None and not transposed:
            grad_input, grad_weight = _in_order(grad_input, grad_weight)
    if output_mask[2]:
        grad_bias = jnp.sum(grad_output, (0, *range(2, grad_output.ndim)))
    return grad_input, grad_weight, grad_bias


@lowering("convolution_backward_overrideable")
def convolution_backward_overrideable(
    grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    return convolution_backward(
        grad_output, input, weight, None, stride, padding, dilation, transposed, output_padding, groups, output_mask
    )
