"""Memory that must not be written: torch's rules for tensors whose elements, or whose inputs, share memory.

A tensor of which two elements are one place in memory cannot be written, nor one that shares a part of its memory with
an input. What is exactly the same memory may be written by elementwise operators only; the caller asks the CPU.

May import: tensor.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from xlatrainer.backend.tensor import storage_data

__all__ = ["check_apart", "check_outs", "check_written", "plain_tensors"]

# These write the same everywhere, or only warn.
_EXPANDED = "fill_ zero_ tril_ triu_ masked_fill_ index_fill_ index_put_ _index_put_impl_"
_WRITES_EXPANDED = frozenset(f"aten::{name}" for name in _EXPANDED.split())

_WITHIN = "more than one element of the written-to tensor refers to a single memory location"
_WITH_INPUT = "some elements of the input tensor and the written-to tensor refer to a single memory location"


def _refuse(what: str, name: str, written: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        f"unsupported operation: {what}. Please clone() the tensor before performing the operation. ({name} writes a "
        f"tensor with shape {list(written.shape)}, strides {list(written.stride())})"
    )


def _shares_within(tensor: torch.Tensor) -> bool:
    """True for what `expand` makes; other strides that meet are not looked for, as in torch."""
    return 0 not in tensor.shape and any(
        step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _reach(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First byte and end of a dense tensor in its storage; None for others, of which torch does not decide."""
    count = math.prod(tensor.shape)
    if not count or 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) != count:
        return None
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + count * tensor.element_size()


def check_written(name: str, written: torch.Tensor, inputs: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Raise `RuntimeError` where the operator `name` must not write `written`.

    Returns those of `inputs` that are exactly the same memory.
    """
    if 0 in written.stride() and _shares_within(written):
        if name.partition(".")[0] not in _WRITES_EXPANDED:
            raise _refuse(_WITHIN, name, written)
        return []
    same = []
    mine = storage_data(written)
    for tensor in inputs:
        if tensor is written:
            same.append(tensor)
        elif tensor.device.type == "xla" and storage_data(tensor) is mine:
            there, here = _reach(tensor), _reach(written)
            if there is None or here is None or there[1] <= here[0] or here[1] <= there[0]:
                continue
            if there != here or tensor.stride() != written.stride():
                raise _refuse(_WITH_INPUT, name, written)
            same.append(tensor)
    return same


def check_outs(name: str, outs: Sequence[Any], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """`check_written` for all `out=` arguments, tensors or lists of them."""
    tensors = plain_tensors(inputs)
    same: list[torch.Tensor] = []
    for out in plain_tensors(outs):
        data = storage_data(out)
        if data.viewed or any(t.device.type == "xla" and storage_data(t) is data for t in tensors):
            same += check_written(name, out, tensors)
    return same


def check_apart(name: str, out: torch.Tensor, inputs: Sequence[Any]) -> None:
    """`check_outs` for an operator whose result must not be any of its inputs either."""
    if check_outs(name, [out], inputs):
        raise _refuse(_WITH_INPUT, name, out)


def plain_tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors that are arguments or in a list of them."""
    found: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += [item for item in argument if isinstance(item, torch.Tensor)]
    return found
