"""Operators without a lowering run on the CPU: right, counted as `aten::<name>`, and warned about once each.

The tensors are fetched, the operator runs on copies, and the results are put back; what the operator writes is written
back through the tensor's view. May import: tensor, executor, runtime, counters, schema, source, config.
"""

import warnings
from typing import Any

import torch

from xlatrainer import config
from xlatrainer.backend import counters
from xlatrainer.backend._private_api import tree_map
from xlatrainer.backend.overlap import check_outs, plain_tensors
from xlatrainer.backend.recorder import not_on_device
from xlatrainer.backend.schema import signature
from xlatrainer.backend.source import user_line
from xlatrainer.backend.state import state
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
        copies: dict[int, torch.Tensor] = {}
        originals: dict[int, torch.Tensor] = {}

        def to_cpu(item: Any) -> Any:
            if isinstance(item, torch.device) and item.type == "xla":
                return torch.device("cpu")
            if not isinstance(item, torch.Tensor):
                return item
            if item.device.type != "xla":
                if item.dim():
                    raise not_on_device(name, _argument_of(overload, args, kwargs, item), item)
                return item
            if id(item) not in copies:
                copies[id(item)] = _copy_of(item)
                originals[id(item)] = item
            return copies[id(item)]

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
    """The copies do not share memory as the tensors on the device do, so the CPU would not tell."""
    given = _given(overload, args, kwargs)
    names = signature(overload).written
    written = [tensor for tensor in plain_tensors([given.get(name) for name in names]) if tensor.device.type == "xla"]
    check_outs(overload.name(), written, [arg for name, arg in given.items() if name not in names])


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy with the same strides where those are dense: gradients of some operators depend on them."""
    copy = read_to_host([tensor])[0]
    laid_out = torch.empty_like(tensor, device="cpu")
    return copy if laid_out.stride() == copy.stride() else laid_out.copy_(copy)


def _given(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = [argument.name for argument in overload._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _argument_of(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor) -> str:
    for name, given in _given(overload, args, kwargs).items():
        if any(item is tensor for item in (given if isinstance(given, list | tuple) else [given])):
            return name
    return "?"


def _write_back(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], copies: dict[int, torch.Tensor]) -> None:
    given = _given(overload, args, kwargs)
    for name in signature(overload).written:
        written = given.get(name)
        for tensor in written if isinstance(written, list | tuple) else [written]:
            if not isinstance(tensor, torch.Tensor):
                continue
            copy = copies[id(tensor)]
            if copy.shape != tensor.shape:
                torch.ops.aten.resize_(tensor, list(copy.shape))
            assign(tensor, from_host(copy))
