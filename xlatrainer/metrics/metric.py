"""`Metric`: values gathered over many batches, with the state on the device.

Owns its state, nothing of models, losses or logs. The Trainer calls `to` once, `reset` before each pass over data,
`update` once a batch, and `compute` after each `update` within the same step: the program of the step then holds the
value, and reading it later runs nothing more.
"""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["Metric"]


class Metric(ABC):
    """A figure over all the examples of a pass, right with batches of any size.

    A subclass names its state with `add_state` and changes it in `update` with tensor operations only. Reading a value
    (`item`, `float`, `if tensor`) there would stop the device in every batch.

    Args:
        name: Its name in the logs.

    Example:
        >>> class Largest(Metric):
        ...     def __init__(self):
        ...         super().__init__("largest")
        ...         self.add_state("value", torch.tensor(float("-inf")))
        ...
        ...     def update(self, prediction, target):
        ...         self.value = torch.maximum(self.value, prediction.max())
        ...
        ...     def compute(self):
        ...         return self.value
        >>> metric = Largest()
        >>> metric.update(torch.tensor([1.0, 3.0]), torch.zeros(2))
        >>> metric.compute()
        tensor(3.)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._device = torch.device("cpu")
        self._initial: dict[str, Tensor] = {}

    def add_state(self, name: str, initial: Tensor) -> None:
        """Declare the attribute `name`, a tensor that `reset` sets to `initial` (on the CPU, any shape)."""
        self._initial[name] = initial
        setattr(self, name, initial.to(self._device, copy=True))

    def to(self, device: torch.device) -> Self:
        """Keep the state on `device` from now on, and reset it."""
        self._device = device
        self.reset()
        return self

    def reset(self) -> None:
        """Set the state to its initial values.

        They are copied from the CPU and not made on the device, so that the first step after a reset has the same
        program as every other.
        """
        for name, initial in self._initial.items():
            setattr(self, name, initial.to(self._device, copy=True))

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take in a batch; the Trainer calls `update(prediction, target)` with both on the device."""

    @abstractmethod
    def compute(self) -> Tensor:
        """The figure over all batches since `reset`: a tensor of shape (), on the device."""
