"""What a call comes to on the CPU and on `xla`: results and what was written, warnings, or the error.

`Mirror` puts the arguments of a call on the device the way they lie on the CPU: tensors that share memory share it
there. Nothing here reads a result before it is asked to, so an error that a call raises was raised at the call.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

import xlatrainer as xla

__all__ = ["Mirror", "Outcome", "outcome"]

# What may be raised for a wrong call; anything else (an internal error of ours) fails the test at once.
ERRORS = (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError, AssertionError, AttributeError)


class Mirror:
    """Copies of CPU tensors on the device; the same tensor, or the same memory, gives the same there."""

    def __init__(self) -> None:
        self.copies: dict[int, torch.Tensor] = {}
        self.storages: dict[int, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []

    def __call__(self, tree: Any) -> Any:
        return tree_map(self._leaf, tree)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return xla.device() if leaf.type == "cpu" else leaf
        if isinstance(leaf, str) and leaf == "cpu":
            return "xla"
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
            return leaf
        if id(leaf) not in self.copies:
            self.kept.append(leaf)  # so that its id stays its own
            self.copies[id(leaf)] = self._copy(leaf).requires_grad_(leaf.requires_grad)
        return self.copies[id(leaf)]

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg() or not tensor.numel():
            return tensor.to(xla.device())
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.storages:
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            if whole.numel() == tensor.numel() and tensor.is_contiguous():
                self.storages[key] = tensor.to(xla.device())
                return self.storages[key].detach()
            self.storages[key] = whole.to(xla.device())
        return self.storages[key].as_strided(tensor.size(), tensor.stride(), int(tensor.storage_offset())).detach()


@dataclass
class Outcome:
    """Attributes:
    error: what was raised, or None.
    result: what was returned.
    warned: the warnings, as text.
    """

    error: Exception | None = None
    result: Any = None
    warned: list[str] = field(default_factory=list)

    @property
    def kind(self) -> type[Exception] | None:
        return None if self.error is None else type(self.error)

    def __str__(self) -> str:
        if self.error is None:
            return "no error"
        return f"{type(self.error).__name__}: {str(self.error).splitlines()[0][:200] if str(self.error) else ''}"


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """Call, and note what came of it. That an operator runs on the CPU is no warning about the call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = Outcome(result=function(*args, **kwargs))
        except ERRORS as error:
            found = Outcome(error=error)
    found.warned = [str(w.message) for w in caught if "has no lowering for xla" not in str(w.message)]
    return found
