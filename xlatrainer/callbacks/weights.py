"""Copies of a Trainer's weights that stay on its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["copy_weights", "put_weights"]

_AVERAGE = "average of "  # before a parameter's name; no parameter has blanks in its name


def copy_weights(trainer: Trainer) -> dict[str, Tensor]:
    """A copy of all parameters, persistent buffers and averages by name, on the device; tied ones share a copy."""
    copies: dict[int, Tensor] = {}
    with torch.no_grad():
        return {name: copies.setdefault(id(tensor), tensor.detach().clone()) for name, tensor in _weights(trainer)}


def put_weights(trainer: Trainer, weights: Mapping[str, Tensor]) -> None:
    """Write what `copy_weights` returned back into the model's own parameters and buffers, and the averages."""
    with torch.no_grad():
        for name, tensor in _weights(trainer):
            if name in weights:
                tensor.detach().copy_(weights[name])


def _weights(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in trainer.model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            yield name, tensor
    if trainer.ema is not None:
        for name, average in trainer.ema.averages.items():
            yield f"{_AVERAGE}{name}", average
