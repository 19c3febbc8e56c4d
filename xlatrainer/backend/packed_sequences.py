"""Packing padded sequences and padding packed ones, as operators of our own whose programs serve all lengths.

torch makes these of slices, one for each length, so that each batch of sequences would have a program of its own.
What is not on the device as a whole, or wrong, is left to torch.

May import: torch, _private_api.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from xlatrainer.backend._private_api import call_autograd_kernel, call_implicit_kernel, function_transforms_active

__all__ = ["PACKING", "are_batch_sizes"]

aten = torch.ops.aten
_library = torch.library.Library("xlatrainer", "FRAGMENT")
_library.define("packed_rows(Tensor padded, Tensor batch_sizes, int count) -> Tensor")
_library.define("padded_rows(Tensor packed, Tensor batch_sizes, int batch, int steps, Scalar value) -> Tensor")
_packed_rows = torch.ops.xlatrainer.packed_rows.default
_padded_rows = torch.ops.xlatrainer.padded_rows.default


def _packed_shape(padded: torch.Tensor, batch_sizes: torch.Tensor, count: int) -> torch.Tensor:
    return padded.new_empty(count, *padded.shape[2:])


def _padded_shape(
    packed: torch.Tensor, batch_sizes: torch.Tensor, batch: int, steps: int, value: float
) -> torch.Tensor:
    return packed.new_empty(steps, batch, *packed.shape[1:])


_library.impl("packed_rows", _packed_shape, "Meta")
_library.impl("padded_rows", _padded_shape, "Meta")


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, batch_sizes: torch.Tensor, count: int) -> torch.Tensor:
        ctx.call = batch_sizes, padded.shape[1], padded.shape[0]
        return _packed_rows(padded, batch_sizes, count)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Pad.apply(grads[0], *ctx.call, 0), None, None


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, batch_sizes: torch.Tensor, batch: int, steps: int, value: float
    ) -> torch.Tensor:
        ctx.call = batch_sizes, packed.shape[0]
        return _padded_rows(packed, batch_sizes, batch, steps, value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Pack.apply(grads[0], *ctx.call), None, None, None, None


def _takes(tensor: torch.Tensor) -> bool:
    return not function_transforms_active() and unpack_dual(tensor).tangent is None


def _numbers(tensor: Any) -> list[int]:
    """Of a tensor of lengths on the CPU; nothing of anything else."""
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.dtype is not torch.int64 or tensor.dim() != 1:
        return []
    return tensor.tolist()


def _descends(numbers: list[int]) -> bool:
    """And stays above 0."""
    return numbers[-1] > 0 and all(one >= next_one for one, next_one in zip(numbers, numbers[1:], strict=False))


def are_batch_sizes(batch_sizes: Any, rows: int) -> bool:
    """Whether these are the batch sizes of `rows` packed rows."""
    sizes = _numbers(batch_sizes)
    return bool(sizes) and _descends(sizes) and sum(sizes) == rows


def pack_padded_sequence(
    input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    overload = aten._pack_padded_sequence.default
    numbers = _numbers(lengths)
    if not numbers or input.dim() < 2 or not _takes(input):
        return call_autograd_kernel(overload, input, lengths, batch_first)
    padded = input.transpose(0, 1) if batch_first else input
    steps, batch = padded.shape[:2]
    if len(numbers) != batch or not _descends(numbers) or numbers[0] > steps:
        return call_autograd_kernel(overload, input, lengths, batch_first)
    batch_sizes = (lengths > torch.arange(numbers[0])[:, None]).sum(1)
    data = _Pack.apply(padded, batch_sizes.to(input.device), sum(numbers))
    return data, batch_sizes


def pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    fits = data.is_floating_point() and data.dim() and are_batch_sizes(batch_sizes, data.shape[0]) and _takes(data)
    steps = batch_sizes.shape[0] if fits else 0
    if not fits or 0 < total_length < steps:
        overload = aten._pad_packed_sequence.default
        return call_implicit_kernel(overload, data, batch_sizes, batch_first, padding_value, total_length)
    batch = int(batch_sizes[0])
    padded = _Pad.apply(data, batch_sizes.to(data.device), batch, max(steps, total_length), padding_value)
    lengths = (torch.arange(batch) < batch_sizes[:, None]).sum(0)
    return padded.transpose(0, 1) if batch_first else padded, lengths


# By overload, without `aten::`; at the autograd key.
PACKING: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": pack_padded_sequence,
    "_pad_packed_sequence": pad_packed_sequence,
}
