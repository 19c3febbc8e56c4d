"""Shapes and dtypes of results, from torch's own meta kernels; they raise what torch raises for wrong arguments.

May import: torch, ir.
"""

from typing import Any

import torch

from xlatrainer.backend.ir import Spec, make_spec

__all__ = ["infer", "meta_tensor"]


def meta_tensor(spec: Spec) -> torch.Tensor:
    """A tensor of this shape and dtype without data."""
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def infer(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Specs of the results of `overload`, in the structure of its results (one, a tuple or list, None where none is).

    `args` and `kwargs` have meta tensors for tensors; a device among them becomes `meta`.
    """
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    with torch.no_grad():
        return _specs(overload(*args, **kwargs))


def _specs(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return make_spec(tuple(result.shape), result.dtype)
    if isinstance(result, list | tuple):
        return tuple(_specs(item) for item in result)
    return None
