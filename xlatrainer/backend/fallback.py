"""Operators without a lowering run on the CPU: right, counted as `aten::<name>`, and warned about once each.

The tensors are fetched, the operator runs on copies with the same strides and the same sharing of storages, and the
results are put back; what the operator writes is written back through the tensor's view.

May import: tensor, transfer, recorder's errors, strided, counters, schema, source, config.
"""

import warnings
from typing import Any

import torch

from xlatrainer import config
from xlatrainer.backend import counters
from xlatrainer.backend._private_api import tree_map
from xlatrainer.backend.overlap import check_outs, plain_tensors
from xlatrainer.backend.recorder import not_on_device
from xlatrainer.backend.schema import argument_names, by_name, signature
from xlatrainer.backend.source import user_line
from xlatrainer.backend.state import state
from xlatrainer.backend.strided import Geometry, extent
from xlatrainer.backend.tensor import assign, from_host, new_tensor
from xlatrainer.backend.transfer import read_to_host

__all__ = ["run_on_cpu"]

_warned: set[str] = set()


def _announce(name: str) -> None:
    counters.add(name)
    if config.get("fallback") == "error":
        raise NotImplementedError(
            f"{name} has no lowering for xla, and XLATRAINER_FALLBACK=error forbids to run it on the CPU; called at "
            f"{user_line()}. See CONTRIBUTING.md, 'Add an operator'"
        )
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} has no lowering for xla: it runs on the CPU, which ends the trace and copies its tensors "
            f"each time (first called at {user_line()}; said once for each operator)",
            RuntimeWarning,
            stacklevel=2,
        )


def run_on_cpu(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `overload` on CPU copies of its `xla` tensors; results and what it writes go back to the device."""
    name = overload.name().split(".")[0]
    with state.lock:
        _announce(name)
        originals = _tensors_of(overload, args, kwargs)
        copies = _copies_of(list(originals.values()))

        def to_cpu(item: Any) -> Any:
            if isinstance(item, torch.device) and item.type == "xla":
                return torch.device("cpu")
            return copies.get(id(item), item) if isinstance(item, torch.Tensor) else item

        _check_memory(overload, args, kwargs)
        cpu_args, cpu_kwargs = tree_map(to_cpu, (args, kwargs))
        result = overload(*cpu_args, **cpu_kwargs)
        _write_back(overload, args, kwargs, copies)
        back = {id(copy): originals[key] for key, copy in copies.items()}

        def to_xla(item: Any) -> Any:
            if not isinstance(item, torch.Tensor) or item.device.type != "cpu":
                return item
            return back[id(item)] if id(item) in back else new_tensor(from_host(item))

        return tree_map(to_xla, result)


def _check_memory(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for written memory that other arguments share, in the CPU's words: a rule of torch's own operators."""
    if not overload.name().startswith("aten::"):
        return
    given = by_name(argument_names(overload), args, kwargs)
    names = signature(overload).written
    written = [tensor for tensor in plain_tensors([given.get(name) for name in names]) if tensor.device.type == "xla"]
    check_outs(overload.name(), written, [arg for name, arg in given.items() if name not in names])


def _tensors_of(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
    """The `xla` tensors of a call by their identity; of others only 0-dim ones, which stand for numbers, are taken."""
    found: dict[int, torch.Tensor] = {}

    def look(item: Any) -> None:
        if not isinstance(item, torch.Tensor):
            return
        if item.device.type == "xla":
            found[id(item)] = item
        elif item.dim():
            raise not_on_device(overload.name().split(".")[0], _argument_of(overload, args, kwargs, item), item)

    tree_map(look, (args, kwargs))
    return found


def _copies_of(tensors: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """CPU copies, by the identity of what they copy, with its strides; tensors that share a storage share one there."""
    sharing: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        sharing.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    copies: dict[int, torch.Tensor] = {}
    for group in sharing.values():
        if len(group) == 1 or not all(map(_is_plain_view, group, [group[0].dtype] * len(group))):
            copies.update((id(tensor), _laid_out(tensor, read_to_host([tensor])[0])) for tensor in group)
            continue
        length = max(_end(tensor) for tensor in group)
        (storage,) = read_to_host([group[0].as_strided((length,), (1,), 0)])
        for tensor in group:
            copies[id(tensor)] = storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return copies


def _is_plain_view(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype is dtype and not tensor.is_conj() and not tensor.is_neg()


def _end(tensor: torch.Tensor) -> int:
    """How many elements of its storage the tensor reaches over."""
    return int(tensor.storage_offset()) + extent(Geometry(tuple(tensor.shape), tensor.stride(), 0))


def _laid_out(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """`copy`, which is contiguous, with the strides of `tensor`: gradients of some operators depend on them."""
    if copy.stride() == tensor.stride() or not copy.numel():
        return copy
    once = [slice(1 if step == 0 else None) for step in tensor.stride()]  # what is expanded is written one time
    space = torch.empty(_end(tensor) - int(tensor.storage_offset()), dtype=copy.dtype)
    laid_out = space.as_strided(tensor.size(), tensor.stride())
    laid_out[tuple(once)].copy_(copy[tuple(once)])
    return laid_out


def _argument_of(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor) -> str:
    for name, given in by_name(argument_names(overload), args, kwargs).items():
        if any(item is tensor for item in (given if isinstance(given, list | tuple) else [given])):
            return name
    return "?"


def _write_back(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], copies: dict[int, torch.Tensor]) -> None:
    given = by_name(argument_names(overload), args, kwargs)
    for name in signature(overload).written:
        written = given.get(name)
        for tensor in written if isinstance(written, list | tuple) else [written]:
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "xla":
                continue
            copy = copies[id(tensor)]
            if copy.shape != tensor.shape:
                torch.ops.aten.resize_(tensor, list(copy.shape))
            assign(tensor, from_host(copy))
