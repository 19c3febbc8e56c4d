"""Shapes and dtypes of results, from torch's own meta kernels; they raise what torch raises for wrong arguments.

The few operators without one are in a table here.

May import: torch, ir.
"""

from collections.abc import Callable
from typing import Any

import torch

from xlatrainer.backend.ir import Spec, make_spec

__all__ = ["infer", "meta_tensor"]


def meta_tensor(spec: Spec) -> torch.Tensor:
    """A tensor of this shape and dtype without data."""
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def _geqrf(self: torch.Tensor) -> Any:
    *batch, rows, columns = self.shape
    return self.new_empty(self.shape), self.new_empty(*batch, min(rows, columns))


def _lstsq(self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Solution, residuals, rank and singular values; what a driver does not give is empty."""
    *batch, rows, columns = self.shape
    real = self.new_empty(0).abs()
    vector = b.dim() < self.dim()
    batch = list(torch.broadcast_shapes(batch, b.shape[:-1] if vector else b.shape[:-2]))
    sides = [] if vector else [b.shape[-1]]
    residuals = real.new_empty(*batch, *(sides or [1])) if driver == "gels" and rows > columns else real
    rank = self.new_empty([0] if driver == "gels" else batch, dtype=torch.int64)
    values = real.new_empty(*batch, min(rows, columns)) if driver in ("gelsd", "gelss") else real
    return self.new_empty(*batch, columns, *sides), residuals, rank, values


def _histogram(self: torch.Tensor, bins: Any, **options: Any) -> Any:
    count = bins if isinstance(bins, int) else bins.shape[0] - 1
    return self.new_empty(count), self.new_empty(count + 1)


def _histogramdd(self: torch.Tensor, bins: Any, **options: Any) -> Any:
    return self.new_empty([count if isinstance(count, int) else count.shape[0] - 1 for count in bins])


def _histogramdd_edges(self: torch.Tensor, bins: Any, **options: Any) -> Any:
    return tuple(self.new_empty(count + 1) for count in bins)


# Operators of which torch has no meta kernel.
_WITHOUT_META: dict[str, Callable[..., Any]] = {
    "aten::_histogramdd_bin_edges": _histogramdd_edges,
    "aten::_histogramdd_from_bin_cts": _histogramdd,
    "aten::_histogramdd_from_bin_tensors": _histogramdd,
    "aten::geqrf": _geqrf,
    "aten::histogram.bin_ct": _histogram,
    "aten::histogram.bins_tensor": _histogram,
    "aten::linalg_lstsq": _lstsq,
}


def infer(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Specs of the results of `overload`, in the structure of its results (one, a tuple or list, None where none is).

    `args` and `kwargs` have meta tensors for tensors; a device among them becomes `meta`.
    """
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    with torch.no_grad():
        return _specs(_WITHOUT_META.get(overload.name(), overload)(*args, **kwargs))


def _specs(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return make_spec(tuple(result.shape), result.dtype)
    if isinstance(result, list | tuple):
        return tuple(_specs(item) for item in result)
    return None
