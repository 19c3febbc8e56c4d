"""`out=` of every operator of torch's database that has it: on `xla` all comes as on the CPU.

Each operator is called once for each way of giving `out=` (`CASES`): of the right shape, empty, of another shape, with
other strides, of another dtype, sharing memory with an input, wanting a gradient. The two devices must agree on whether
it fails and how, whether a warning says that the tensor was resized, on shape, dtype, strides and values, and on the
memory around a tensor that is a view. The operators of everyday models run always, the whole database is marked slow.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.backend.outcomes import OPERATORS, Mirror, OpInfo, Outcome, full_name, outcome, tensors

pytestmark = pytest.mark.filterwarnings("ignore")

GARBAGE = 7


def _filled(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, GARBAGE, dtype=dtype)


def _strided(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Transposed, every second element of a larger memory, not from its start."""
    shape = [*reversed(result.shape)]
    base = _filled([2 * n + 1 for n in shape] or [3], result.dtype)
    if not shape:
        return base[1]
    return base[tuple(slice(1, 2 * n + 1, 2) for n in shape)].permute(*reversed(range(len(shape))))


def _expanded(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """One element for all, in a memory that would hold all: a few CPU kernels do not look before they write."""
    if result.numel() < 2:
        return None
    return _filled([result.numel()], result.dtype).as_strided(result.shape, [0] * result.dim())


def _first_input(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """The input of which `out=` could be a part of the memory."""
    for tensor in inputs:
        if tensor.shape == result.shape and tensor.dtype == result.dtype and tensor.is_contiguous() and tensor.dim():
            return tensor
    return None


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _narrower(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.float32
    return torch.int64 if dtype.is_floating_point else torch.bool


def _wrong_shape(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    shape = list(result.shape) or [1]
    return _filled([*shape[:-1], shape[-1] + 1] if result.dim() else [2], result.dtype)


# From a result and the inputs, which they may be replaced in, an `out=`; None where the case does not arise.
Case = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor | None]
CASES: dict[str, Case] = {
    "right shape": lambda result, inputs: _filled(result.shape, result.dtype),
    "empty": lambda result, inputs: torch.empty(0, dtype=result.dtype),
    "wrong shape": _wrong_shape,
    "strides": _strided,
    "wider dtype": lambda result, inputs: _filled(result.shape, _wider(result.dtype)),
    "narrower dtype": lambda result, inputs: _filled(result.shape, _narrower(result.dtype)),
    "wants gradient": lambda result, inputs: (
        _filled(result.shape, result.dtype).requires_grad_() if result.is_floating_point() else None
    ),
    "expanded": _expanded,
    "is an input": _first_input,
}
