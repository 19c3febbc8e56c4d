"""What CPU kernels say of shapes and options that torch's meta kernels let pass.

A function here has the arguments of its operator, with meta tensors, and raises what the CPU raises; it is called where
shapes are inferred, once for each kind of call.

May import: torch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["check_arguments"]


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
    "aten::segment_reduce": _segment_reduce,
}


def check_arguments(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what the CPU raises for these arguments, meta tensors among them, beyond what shape inference says."""
    check = _CHECKS.get(overload.name())
    if check is not None:
        check(*args, **kwargs)
