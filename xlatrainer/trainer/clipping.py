"""Clipping of gradients, without reading any."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Clipping"]


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped before an update; nothing by default, and at most one of the three.

    Attributes:
        global_clipnorm: The largest norm of all gradients together; above it they are scaled down alike.
        clipnorm: The largest norm of each parameter's gradient on its own, as in Keras.
        clipvalue: The largest absolute value of an element.

    Raises:
        ValueError: If several are given, or one is not above 0.
    """

    global_clipnorm: float | None = None
    clipnorm: float | None = None
    clipvalue: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"only one of global_clipnorm, clipnorm and clipvalue may be given, got {given}")
        for name, value in given.items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")

    @torch.no_grad()
    def apply(self, parameters: Iterable[nn.Parameter]) -> Tensor | None:
        """Clip the gradients in place; returns their global norm before, shape (), if it is what is clipped by."""
        clipped = [parameter for parameter in parameters if parameter.grad is not None]
        if not clipped:
            return None
        if self.global_clipnorm is not None:
            return nn.utils.clip_grad_norm_(clipped, self.global_clipnorm)
        if self.clipvalue is not None:
            nn.utils.clip_grad_value_(clipped, self.clipvalue)
        if self.clipnorm is not None:
            for parameter in clipped:
                assert parameter.grad is not None
                norm = torch.linalg.vector_norm(parameter.grad)
                parameter.grad.mul_((self.clipnorm / norm).clamp(max=1.0))  # a norm of 0 gives infinity, so 1
        return None
