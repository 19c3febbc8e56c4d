"""torch dtypes, numpy/JAX dtypes, torch's type promotion, and what the device holds a dtype as: no arrays.

May import: torch, numpy, ml_dtypes.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

__all__ = [
    "Operand",
    "Policy",
    "compute_dtype",
    "from_numpy",
    "is_supported",
    "note_held",
    "number_dtype",
    "opmath",
    "policy",
    "result_type",
    "use_policy",
    "to_numpy",
]

_TABLE: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}
_NUMPY = {dtype: np.dtype(kind) for dtype, kind in _TABLE.items()}
_TORCH = {kind: dtype for dtype, kind in _NUMPY.items()}
_NUMBER = {bool: torch.bool, int: torch.int64}
_HALF = (torch.float16, torch.bfloat16)


def is_supported(dtype: torch.dtype) -> bool:
    """True if XLA has this dtype."""
    return dtype in _NUMPY


def to_numpy(dtype: torch.dtype) -> np.dtype:
    """The numpy (and JAX) dtype of a torch dtype; raises `TypeError` if XLA has none."""
    try:
        return _NUMPY[dtype]
    except KeyError:
        accepted = ", ".join(str(d).removeprefix("torch.") for d in _NUMPY)
        raise TypeError(f"{dtype} does not exist on the xla device; it has {accepted}") from None


def from_numpy(dtype: Any) -> torch.dtype:
    """The torch dtype of a numpy (or JAX) dtype."""
    return _TORCH[np.dtype(dtype)]


class Operand(NamedTuple):
    """What type promotion needs of one operand; `wrapped` is true for a Python number."""

    dtype: torch.dtype
    ndim: int
    wrapped: bool = False


def number_dtype(kind: type) -> torch.dtype:
    """The dtype that a Python number of this type has in torch: bool, int64, or the default (complex) dtype."""
    if kind in _NUMBER:
        return _NUMBER[kind]
    default = torch.get_default_dtype()
    return torch.promote_types(default, torch.complex32) if kind is complex else default


def _promote(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    if a is None or b is None:
        return a if b is None else b
    return torch.promote_types(a, b)


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """torch's rule between the three classes of operands (with dims, 0-dim, Python numbers)."""
    if higher is None or lower is None:
        return _promote(higher, lower)
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return torch.promote_types(higher, torch.complex32) if lower.is_complex else higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def result_type(operands: Iterable[Operand]) -> torch.dtype:
    """`torch.result_type` for any number of operands, from their dtypes and ranks alone.

    Source: the type promotion rules in torch's "Tensor Attributes" page.
    """
    dims: torch.dtype | None = None
    zeros: torch.dtype | None = None
    numbers: torch.dtype | None = None
    for dtype, ndim, wrapped in operands:
        if wrapped:
            numbers = _promote(numbers, dtype)
        elif ndim:
            dims = _promote(dims, dtype)
        else:
            zeros = _promote(zeros, dtype)
    result = _combine(dims, _combine(zeros, numbers))
    if result is None:
        raise TypeError("type promotion needs at least one operand")
    return result


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype torch's CPU kernels compute in: float32 for the half types, else the dtype itself."""
    return torch.float32 if dtype in _HALF else dtype


def compute_dtype(dtype: torch.dtype) -> np.dtype:
    """`opmath` as a numpy dtype."""
    return to_numpy(opmath(dtype))


@dataclass(frozen=True)
class Policy:
    """What the device holds the numbers of a tensor as, where that is not the tensor's own dtype.

    Attributes:
        name: says it all: policies of equal names are equal.
        held: for a dtype of tensors the dtype of the numbers on the device. A dtype that is not named is its own.
        missing: dtypes that are held as others only because the platform does not have them.
    """

    name: str = ""
    held: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    missing: frozenset[torch.dtype] = frozenset()

    def computed(self, dtype: torch.dtype, *, narrow: bool = False) -> torch.dtype:
        """What operators compute numbers of this dtype as: for what is held as a half type that is float32.

        Args:
            dtype: of a tensor.
            narrow: for an operator that multiplies matrices, which computes with what is held.
        """
        held = self.held.get(dtype, dtype)
        return held if narrow or held is dtype else opmath(held)


class _Current:
    policy = Policy()
    told: set[torch.dtype] = set()


def policy() -> Policy:
    """The policy by which values are made now."""
    return _Current.policy


def use_policy(new: Policy) -> None:
    """Make values by another policy from now on."""
    _Current.policy = new


def note_held(dtype: torch.dtype) -> None:
    """Warn, once for each, of a dtype that the platform does not have."""
    if dtype in _Current.policy.missing and dtype not in _Current.told:
        _Current.told.add(dtype)
        held = _Current.policy.held[dtype]
        warnings.warn(
            f"this platform has no {dtype}: such tensors are computed in {held}, with the digits that it has; use "
            f"{held}, or the CPU platform (PJRT_DEVICE=CPU)",
            stacklevel=2,
        )
