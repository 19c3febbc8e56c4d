"""Sharded parameters are made whole for the forward pass of their module, and their gradients sharded again.

Said as constraints: XLA makes an all-gather of the one and a reduce-scatter of the other. What the backward pass would
keep of a whole parameter is made again from the shards (`reshard_after_forward`), so that no device holds the whole
model from the forward to the backward pass.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from xlatrainer.backend.placement import Sharding
from xlatrainer.distributed.sharding import regathered, sharded_like, sharding_of

__all__ = ["gather_in_forward", "remove_gathering"]

# Modules that read their children's parameters without calling them.
_READERS = (nn.MultiheadAttention,)


def gather_in_forward(
    model: nn.Module, gradient_sharding: Callable[[Tensor], Sharding | None], reshard_after_forward: bool
) -> None:
    """Add hooks to the modules of `model` that have parameters of their own.

    Args:
        model: With its parameters in place.
        gradient_sharding: How the gradient of a parameter shall lie; None: nothing is done for this parameter.
        reshard_after_forward: Whether the backward pass gathers again.
    """
    remove_gathering(model)
    handles = _handles[model] = []
    taken: set[int] = set()
    for module in model.modules():
        members = list(module.modules()) if isinstance(module, _READERS) else [module]
        own = [m for m in members if id(m) not in taken and any(p is not None for p in m._parameters.values())]
        taken.update(id(m) for m in own)
        if own:
            hooks = _Gather(own, gradient_sharding, reshard_after_forward)
            handles.append(module.register_forward_pre_hook(hooks.before))
            handles.append(module.register_forward_hook(hooks.after, always_call=True))


_handles: "weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]" = weakref.WeakKeyDictionary()


def remove_gathering(model: nn.Module) -> None:
    """Take the hooks off again that `gather_in_forward` added to the modules of this model."""
    for handle in _handles.pop(model, []):
        handle.remove()


class _Gather:
    """The hooks of one module: its parameters, or its children's, are whole tensors while it runs."""

    def __init__(
        self, members: list[nn.Module], gradient_sharding: Callable[[Tensor], Sharding | None], reshards: bool
    ) -> None:
        self.members = members
        self.gradient_sharding = gradient_sharding
        self.reshards = reshards
        self.running: list[tuple[list[tuple[nn.Module, str, nn.Parameter]], Any]] = []

    def before(self, module: nn.Module, args: Any) -> None:
        """Put whole tensors in the places of the parameters."""
        places = []
        whole: dict[int, tuple[Tensor, Tensor]] = {}
        for member in self.members:
            for key, parameter in member._parameters.items():
                if not isinstance(parameter, nn.Parameter):
                    continue
                sharding = self.gradient_sharding(parameter)
                if sharding is not None:
                    gathered = sharded_like(parameter, sharding.home.replicated, sharding)
                    whole[id(gathered.untyped_storage()._xla)] = (parameter, gathered)  # type: ignore[attr-defined]
                    places.append((member, key, parameter))
                    member._parameters[key] = gathered  # type: ignore[assignment]
        hooks: Any = contextlib.nullcontext()
        if self.reshards and torch.is_grad_enabled() and any(sharding_of(p) for _, _, p in places):
            hooks = torch.autograd.graph.saved_tensors_hooks(_pack(whole), _unpack)
        hooks.__enter__()
        self.running.append((places, hooks))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Put the parameters back."""
        places, hooks = self.running.pop()
        hooks.__exit__(None, None, None)
        for member, key, parameter in places:
            member._parameters[key] = parameter


def _pack(whole: dict[int, tuple[Tensor, Tensor]]) -> Callable[[Tensor], Any]:
    def pack(tensor: Tensor) -> Any:
        data = getattr(tensor.untyped_storage(), "_xla", None)
        found = whole.get(id(data))
        if found is None:
            return tensor
        return found[0], tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    return pack


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    parameter, shape, stride, offset = packed
    return regathered(parameter.detach()).as_strided(shape, stride, offset)
