"""What an operator does with its `out=` arguments, by torch's rules.

One of another shape is resized, with a warning where it had elements. One of another dtype takes the result converted,
or the call is refused: operator by operator, as on the CPU. So are memory that cannot be written and other devices.

May import: cpu_errors, overlap, recorder, storage_kernels, tensor, ir.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from xlatrainer.backend import storage_kernels
from xlatrainer.backend.cpu_errors import refuse_alias
from xlatrainer.backend.ir import Spec
from xlatrainer.backend.overlap import check_outs
from xlatrainer.backend.recorder import not_on_device
from xlatrainer.backend.tensor import storage_data

__all__ = ["check_devices", "check_memory", "fit", "is_plain", "takes_dtype_of_out"]

# These compute in the dtype of their out= argument if they are told no other.
_IN_DTYPE_OF_OUT = frozenset({"aten::sum", "aten::nansum", "aten::prod", "aten::mean", "aten::cumsum", "aten::cumprod"})

# These resize without a word.
_SILENT_ONES = "addbmm bernoulli eye linspace log_sigmoid_forward logspace multinomial narrow_copy"
_SILENT = frozenset(f"aten::{name}" for name in _SILENT_ONES.split())


def check_devices(overload: Any, targets: Sequence[torch.Tensor]) -> None:
    """Raise `RuntimeError` where an `out=` argument is on another device."""
    for target in targets:
        if target.device.type != "xla":
            raise not_on_device(overload.name(), "out", target)


def is_plain(out: torch.Tensor, spec: Spec, args: Sequence[Any]) -> bool:
    """True where nothing has to be looked at: `out` has the result's shape and dtype and is no view and no input."""
    if storage_data(out).viewed or out.dtype is not spec.dtype or out.shape != spec.shape:
        return False
    return not any(arg is out for arg in args)


def check_memory(overload: Any, outs: dict[str, Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise `RuntimeError` where `out=` arguments must not be written: their own memory, or that of an input."""
    same = check_outs(overload.name(), [*outs.values()], [*args, *kwargs.values()])
    if same:
        refuse_alias(overload, args, kwargs, outs, same)


def takes_dtype_of_out(overload: Any, kwargs: dict[str, Any]) -> bool:
    """True if the call computes in the dtype of its `out=` argument."""
    return overload._schema.name in _IN_DTYPE_OF_OUT and kwargs.get("dtype") is None


def fit(name: str, out: torch.Tensor, spec: Spec) -> bool:
    """Resize `out` to the shape of a result, warning where it had elements of another; false if it fits."""
    if tuple(out.shape) == spec.shape:
        return False
    if math.prod(out.shape) and name.partition(".")[0] not in _SILENT:
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(out.shape)}, which "
            f"does not match the required output shape {list(spec.shape)} (out= of {name}). Resize it "
            "first: `out.resize_(0)`",
            UserWarning,
            stacklevel=2,
        )
    storage_kernels.resize_(out, spec.shape)
    return True
