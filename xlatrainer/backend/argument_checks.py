"""What CPU kernels say of shapes and options that torch's meta kernels let pass.

A function here has the arguments of its operator, with meta tensors, and raises what the CPU raises; it is called where
shapes are inferred, once for each kind of call.

May import: torch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Limits", "check_arguments", "check_numbers", "limits_of_numbers"]


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
) -> None:
    if any(step <= 0 for step in dilation):
        raise RuntimeError(f"dilation should be greater than zero, but got {list(dilation)} (aten::convolution)")
    if any(amount < 0 for amount in padding):
        raise RuntimeError(f"negative padding is not supported, but got {list(padding)} (aten::convolution)")
    if any(step <= 0 for step in stride):
        raise RuntimeError(f"non-positive stride is not supported, but got {list(stride)} (aten::convolution)")


def _index_add(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, **options: Any) -> None:
    dim = dim % self.dim() if self.dim() else 0
    mine, theirs = list(self.shape), list(source.shape)
    if len(mine) != len(theirs) or mine[:dim] + mine[dim + 1 :] != theirs[:dim] + theirs[dim + 1 :]:
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = "
            f"{mine} source.shape = {theirs} (aten::index_add, dim {dim})"
        )


def _as_strided_scatter(
    self: torch.Tensor, src: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> None:
    offset = storage_offset or 0
    reached = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1
    there = self.numel()
    if 0 not in size and (reached > there or offset < 0):
        itemsize = self.element_size()
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {itemsize} "
            f"requiring a storage size of {reached * itemsize} are out of bounds for storage of size {there * itemsize}"
        )


def _histogramdd(self: torch.Tensor, bins: Sequence[Any], **options: Any) -> None:
    if not self.dim() or len(bins) != self.shape[-1]:
        raise RuntimeError(
            "histogramdd: The size of bins must be equal to the innermost dimension of the input, but got "
            f"{len(bins)} bins for an input with shape {list(self.shape)}"
        )


def _boundaries(self: Any, boundaries: torch.Tensor, **options: Any) -> None:
    if boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()}) (aten::bucketize)")


def _segment_reduce(data: torch.Tensor, reduce: str, **options: Any) -> None:
    if not data.is_floating_point():
        raise NotImplementedError(f"aten::segment_reduce is not implemented for {data.dtype}")


def _pow(self: torch.Tensor, exponent: Any) -> None:
    if isinstance(exponent, int) and not self.is_floating_point() and not self.is_complex():
        check_numbers(_limits(torch.result_type(self, exponent)), [exponent])


_CHECKS: dict[str, Callable[..., None]] = {
    "aten::_histogramdd_bin_edges": _histogramdd,
    "aten::_histogramdd_from_bin_cts": _histogramdd,
    "aten::_histogramdd_from_bin_tensors": _histogramdd,
    "aten::as_strided_scatter": _as_strided_scatter,
    "aten::bucketize.Scalar": _boundaries,
    "aten::bucketize.Tensor": _boundaries,
    "aten::convolution": _convolution,
    "aten::index_add": _index_add,
    "aten::index_add_": _index_add,
    "aten::pow.Tensor_Scalar": _pow,
    "aten::segment_reduce": _segment_reduce,
}


def check_arguments(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what the CPU raises for these arguments, meta tensors among them, beyond what shape inference says."""
    check = _CHECKS.get(overload.name())
    if check is not None:
        check(*args, **kwargs)


class Limits(NamedTuple):
    """What a number may be that is converted to `dtype`."""

    low: float
    high: float
    dtype: torch.dtype


# These convert their numbers to the dtype of the result, and refuse what it cannot hold.
_CONVERTING = """
    clamp clamp_max clamp_min constant_pad_nd fill full full_like index_fill masked_fill new_full scalar_tensor scatter
    where
    """
_CONVERTS = frozenset(f"aten::{name}" for name in _CONVERTING.split())

_C_TYPES = {
    torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int", torch.int64: "int64_t", torch.uint8: "uint8_t",
    torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float",
}  # fmt: skip


def _limits(dtype: torch.dtype) -> Limits | None:
    if dtype not in _C_TYPES:
        return None
    if dtype.is_floating_point:
        high = torch.finfo(dtype).max
        return Limits(-high, high, dtype)
    whole = torch.iinfo(dtype)
    return Limits(whole.min if whole.min else -whole.max, whole.max, dtype)  # -1 of an unsigned type is its largest


def limits_of_numbers(overload: Any, dtype: torch.dtype) -> Limits | None:
    """What Python numbers an operator with a result of `dtype` takes; None for any."""
    return _limits(dtype) if overload._schema.name.removesuffix("_") in _CONVERTS else None


def check_numbers(limits: Limits | None, numbers: Sequence[float]) -> None:
    """Raise `RuntimeError` for a number that is not within the limits; infinities and nan are."""
    if limits is None:
        return
    for number in numbers:
        if (number < limits.low or number > limits.high) and not math.isinf(number):
            raise RuntimeError(
                f"value cannot be converted to type {_C_TYPES[limits.dtype]} without overflow: {number} is not in "
                f"{limits.dtype}"
            )
