"""What of a function's arguments replay does not hand to the program: tensors read on the host, and other objects.

May import: torch, numpy.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

__all__ = ["HostReads", "is_plain", "opaque_arguments"]

# Of a tensor, they tell nothing of its contents (nor do its attributes, of which some are views).
_READ_NOTHING = frozenset(
    {
        *("size", "dim", "ndimension", "stride", "numel", "nelement", "storage_offset", "element_size", "__len__"),
        *("is_contiguous", "is_pinned", "is_floating_point", "is_complex", "is_signed", "get_device", "__hash__"),
    }
)
# They read nothing on the host if what they give is on the device, or is the tensor itself.
_MOVE = frozenset({"to", "cuda", "xla", "cpu", "pin_memory", "as_tensor", "detach", "contiguous", "requires_grad_"})

_IMMUTABLE = (bool, int, float, complex, np.generic, str, bytes, enum.Enum, range, type, type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_plain(argument: Any) -> bool:
    """Whether an argument is all said by what it equals; functions of torch are, methods of an object are not."""
    if isinstance(argument, (*_IMMUTABLE, *_OF_TORCH)):
        return True
    is_function = callable(argument) and hasattr(argument, "__name__") and not isinstance(argument, MethodType)
    return is_function and str(getattr(argument, "__module__", "")).split(".")[0] == "torch"


def opaque_arguments(leaves: Sequence[Any]) -> list[str]:
    """Why a function of such arguments cannot be replayed: what is in them is not followed."""
    return [
        f"an argument is a {type(leaf).__module__}.{type(leaf).__qualname__}, into which replay does not look: pass "
        "tensors, numbers and strings, and let the function reach other objects as globals or attributes"
        for leaf in leaves
        if not (_is_dense(leaf) if isinstance(leaf, torch.Tensor) else is_plain(leaf))
    ]


class HostReads(TorchFunctionMode):
    """A block in which it is noted which of these CPU tensors are used otherwise than to be copied to the device.

    What reads their memory behind torch's back, such as an extension in C++, is not seen.

    Attributes:
        read: positions of those tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.read: set[int] = set()
        self._positions: dict[int, list[int]] = {}
        for position, tensor in enumerate(tensors):
            if _is_dense(tensor) and tensor.device.type == "cpu":
                self._positions.setdefault(_memory(tensor), []).append(position)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name != "__get__" and name not in _READ_NOTHING:
            self._note(name, args, kwargs or {}, result)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        operands = list(_cpu_tensors([*args, *kwargs.values()]))
        if name == "copy_" and operands and operands[0] is not args[0]:  # to another device
            return
        for tensor in operands:
            memory = _memory(tensor)
            if memory in self._positions and not (name in _MOVE and _is_moved(result, memory)):
                self.read.update(self._positions[memory])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it has one storage, which is to say all its contents."""
    return tensor.layout is torch.strided


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_moved(result: Any, memory: int) -> bool:
    return isinstance(result, torch.Tensor) and (result.device.type != "cpu" or _memory(result) == memory)


def _cpu_tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if _is_dense(value) and value.device.type == "cpu":
                yield value
        elif isinstance(value, list | tuple):
            yield from _cpu_tensors(value)
        elif isinstance(value, dict):
            yield from _cpu_tensors(value.values())
