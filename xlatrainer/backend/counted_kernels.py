"""Kernels of operators whose results are as long as data says: nonzero, boolean masks, unique and their like.

Each runs what is pending up to a result of full length and the number of elements that count, reads that number, and
cuts the result to it. Only the number leaves the device. That the trace ended for it is counted as `sync::<operator>`.

May import: writing, overlap, tensor, transfer, counters, ir, lowerings of counting.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xlatrainer.backend import counters
from xlatrainer.backend.ir import Operation, Value, make_spec
from xlatrainer.backend.lowerings import counting
from xlatrainer.backend.overlap import check_apart
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import assign, from_host, new_tensor, value_of
from xlatrainer.backend.transfer import read_to_host
from xlatrainer.backend.writing import fit

__all__ = ["kernels", "with_output_size", "with_plain_indices"]

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_operations: dict[tuple[Any, ...], Operation] = {}


def _recorded(name: str, function: Callable[..., Any], tensor: torch.Tensor, shapes: Sequence[Any]) -> list[Value]:
    """Record `function` of the array of `tensor`; `shapes` are the shape and dtype of each result."""
    value = value_of(tensor)
    specs = tuple(make_spec(tuple(shape), dtype) for shape, dtype in shapes)
    key = (name, value.spec, specs)
    operation = _operations.get(key)
    if operation is None:

        def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
            return tuple(function(operands[0]))

        operation = _operations[key] = Operation(name, lower, specs, identity=repr(key))
    return state.trace.append((operation, state.trace.slot_of(value)))


def _read(name: str, *counts: Value) -> list[int]:
    """The numbers, for which the pending trace runs."""
    counters.add(f"sync::{name}")
    return [int(count.item()) for count in read_to_host([new_tensor(count) for count in counts])]


def _cut(value: Value, length: int) -> torch.Tensor:
    """The first `length` rows."""
    spec = value.spec
    if spec.shape[0] == length:
        return new_tensor(value)
    key = ("cut", spec, length)
    operation = _operations.get(key)
    if operation is None:

        def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
            return (operands[0][:length],)

        out = make_spec((length, *spec.shape[1:]), spec.dtype, spec.held)
        operation = _operations[key] = Operation(
            "xla::cut", lower, (out,), detail=f"length={length}", identity=repr(key)
        )
    return new_tensor(state.trace.append((operation, state.trace.slot_of(value)))[0])


# nonzero and masks


def _places(name: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """`nonzero` of each tensor; their numbers are read together."""
    with state.lock:
        found = []
        for tensor in tensors:
            shapes = [((tensor.numel(), tensor.dim()), torch.int64), ((), torch.int64)]
            found.append(_recorded("xla::places", counting.places, tensor, shapes))
        counts = _read(name, *(count for _, count in found))
        return [_cut(places, count) for (places, _), count in zip(found, counts, strict=True)]


def nonzero(self: torch.Tensor) -> torch.Tensor:
    return _places("nonzero", self)[0]


def masked_select(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_select: expected BoolTensor for mask, got {mask.dtype}")
    self, mask = torch.broadcast_tensors(self, mask)
    (places,) = _places("masked_select", mask.reshape(-1))
    return aten.index.Tensor(self.reshape(-1), [places[:, 0]])


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in _MASKS


def _check_masks(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> None:
    dim = 0
    for position, index in enumerate(indices):
        if index is None or index.dtype not in _MASKS:
            dim += 1
            continue
        for length in index.shape:
            if dim >= self.dim() or self.shape[dim] != length:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {position} does not match the shape of the "
                    f"indexed tensor {list(self.shape)} at index {dim}"
                )
            dim += 1


def _check_values(self: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor) -> None:
    """Whether values fit what one mask selects, as far as that is known: how many it selects is not."""
    position, mask = next((i, index) for i, index in enumerate(indices) if index is not None)
    expected = [*self.shape[:position], -1, *self.shape[position + mask.dim() :]]
    given = list(values.shape)
    extra = len(given) - len(expected)
    pairs = list(zip(reversed(given), reversed(expected), strict=False))
    if any(length not in (1, wanted) and wanted != -1 for length, wanted in pairs) or any(
        length != 1 for length in given[: max(extra, 0)]
    ):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {given} cannot be broadcast to indexing result of shape "
            f"{expected}, where -1 is the number of elements that the mask selects"
        )


def _is_one_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    given = [index for index in indices if index is not None]
    return len(given) == 1 and given[0].dtype is torch.bool and given[0].dim() > 0


def _plain(name: str, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices where there are masks: for each dim of a mask the places of its True elements."""
    on_device = [index for index in indices if index is not None and _is_mask(index) and index.device.type == "xla"]
    found = iter(_places(name, *on_device) if on_device else ())
    plain: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or not _is_mask(index):
            plain.append(index)
        elif index.device.type == "xla":
            plain += next(found).unbind(1)
        else:
            plain += index.nonzero().unbind(1)
    return plain


def with_plain_indices(name: str, kernel: Callable[..., Any], position: int, takes_mask: bool) -> Callable[..., Any]:
    """`kernel`, which takes a list of index tensors at `position`, for all that torch takes there.

    Indices may lie on the CPU (`tensor[[0, 2]]`), as on any device, and may be masks. One mask alone is left to a
    kernel that takes it.
    """

    def plain(*args: Any, **kwargs: Any) -> Any:
        indices = args[position]
        with state.lock:
            if any(map(_is_mask, indices)):
                _check_masks(args[0], indices)
                if takes_mask and _is_one_mask(indices):
                    _check_values(args[0], indices, args[position + 1])
                else:
                    indices = _plain(name, indices)
            indices = [
                new_tensor(from_host(index)) if index is not None and index.device.type == "cpu" else index
                for index in indices
            ]
        return kernel(*args[:position], indices, *args[position + 1 :], **kwargs)

    return plain


# unique


def _results(
    name: str, found: list[Value], shape: Sequence[int], return_inverse: bool, return_counts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First elements of the runs, the run of each element, and lengths of the runs; empty where not asked for."""
    first, group, lengths, number = found
    (count,) = _read(name, number)
    nothing = torch.empty(0, dtype=torch.int64, device="xla")
    inverse = new_tensor(group).view(shape) if return_inverse else nothing
    return _cut(first, count), inverse, _cut(lengths, count) if return_counts else nothing


def _refuse_complex(name: str, tensor: torch.Tensor) -> None:
    """Complex numbers have no order, by which equal ones are found."""
    if tensor.dtype.is_complex:
        kind = "ComplexFloat" if tensor.dtype is torch.complex64 else "ComplexDouble"
        raise NotImplementedError(f"\"{name.removeprefix('_').removesuffix('2')}\" not implemented for '{kind}'")


def _flat_unique(name: str, function: Callable[..., Any], self: torch.Tensor, inverse: bool, counts: bool) -> Any:
    _refuse_complex(name, self)
    length = self.numel()
    shapes = [((length,), self.dtype), *[((length,), torch.int64)] * 2, ((), torch.int64)]
    with state.lock:
        found = _recorded(f"xla::{function.__name__}", function, self.reshape(-1), shapes)
        return _results(name, found, self.shape, inverse, counts)


def _row_unique(
    name: str, function: Callable[..., Any], self: torch.Tensor, dim: int, inverse: bool, counts: bool
) -> Any:
    _refuse_complex(name, self)
    length = self.shape[dim]
    if not self.numel():
        if length:
            raise RuntimeError(f"There are 0 sized dimensions, and they aren't selected, so {name} cannot be applied")
        nothing = torch.empty(0, dtype=torch.int64, device="xla")
        return self.clone(), nothing, nothing
    shapes = [*[((length,), torch.int64)] * 3, ((), torch.int64)]
    with state.lock:
        rows = self.movedim(dim, 0).reshape(length, -1)
        found = _recorded(f"xla::{function.__name__}", function, rows, shapes)
        first, *rest = _results(name, found, (length,), inverse, counts)
        return aten.index_select(self, dim, first), *rest


def unique2(
    self: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _flat_unique("_unique2", counting.unique, self, return_inverse, return_counts)


def unique(self: torch.Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return _flat_unique("_unique", counting.unique, self, return_inverse, False)[:2]


def unique_consecutive(
    self: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if dim is not None:
        return unique_dim_consecutive(self, dim, return_inverse, return_counts)
    return _flat_unique("unique_consecutive", counting.runs, self, return_inverse, return_counts)


def unique_dim(
    self: torch.Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _row_unique("unique_dim", counting.unique_rows, self, dim, return_inverse, return_counts)


def unique_dim_consecutive(
    self: torch.Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _row_unique("unique_dim_consecutive", counting.runs_of_rows, self, dim, return_inverse, return_counts)


# repetition


def with_output_size(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` of `repeat_interleave.Tensor`, which must be told the length of its result, for calls that do not."""

    def sized(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
        if repeats.dim() != 1:
            raise RuntimeError(
                f"repeat_interleave only accepts a 1-d tensor of repeats, got shape {list(repeats.shape)}"
            )
        if repeats.dtype is torch.bool or repeats.is_floating_point() or repeats.is_complex():
            raise NotImplementedError(f"repeat_interleave is not implemented for repeats of {repeats.dtype}")
        if output_size is None:
            output_size = _sum_of(repeats)
        return kernel(repeats, output_size=output_size)

    return sized


def _sum_of(repeats: torch.Tensor) -> int:
    with state.lock:
        numbers = [value_of(aten.sum(repeats))]
        if repeats.numel():
            numbers.append(value_of(aten.min(repeats)))
        total, *smallest = _read("repeat_interleave", *numbers)
    if smallest and smallest[0] < 0:
        raise RuntimeError(f"repeats can not be negative, got {smallest[0]}")
    return total


def _writing(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The out= form of a function of one result."""

    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        check_apart(name, out, [*args, *kwargs.values()])
        result = function(*args, **kwargs)
        with state.lock:
            if out.dtype is not result.dtype:
                raise RuntimeError(f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead")
            value = value_of(result)
            fit(name, out, value.spec)
            assign(out, value)
        return out

    return kernel


def kernels() -> dict[str, Callable[..., Any]]:
    """All kernels of this module by overload."""
    return {
        "aten::nonzero": nonzero,
        "aten::nonzero.out": _writing("aten::nonzero.out", nonzero),
        "aten::masked_select": masked_select,
        "aten::masked_select.out": _writing("aten::masked_select.out", masked_select),
        "aten::_unique": unique,
        "aten::_unique2": unique2,
        "aten::unique_consecutive": unique_consecutive,
        "aten::unique_dim": unique_dim,
        "aten::unique_dim_consecutive": unique_dim_consecutive,
    }
