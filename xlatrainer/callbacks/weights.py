"""Copies of a model's weights that stay on its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["copy_weights", "put_weights"]


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and persistent buffers by name, on the device; tied ones share a copy."""
    copies: dict[int, Tensor] = {}
    with torch.no_grad():
        return {
            name: copies.setdefault(id(tensor), tensor.detach().clone())
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }


def put_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write what `copy_weights` returned back into the model's own parameters and buffers."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in weights:
                tensor.detach().copy_(weights[name])
