"""Padding of a batch: a short last one to the shape, and the program, of all others; to equal parts for the devices.

On the host, before the batch goes to the device. The rows that pad are copies of the last one, so that they are
nothing unusual to a model; loss, metrics and counts leave them out. What mixes the rows of a batch does see them: a
batch norm in train mode takes its statistics over them too.
"""

from typing import Any

import torch
from torch import Tensor

from xlatrainer.nested import map_tensors
from xlatrainer.trainer.steps import rows_of

__all__ = ["Padding"]


class Padding:
    """Pads batches with fewer rows than the first one of a pass over data, or with rows that do not make equal parts.

    Args:
        is_on: Whether a short batch is padded to the rows of the others.
        parts: What the rows must be a multiple of. Default 1.

    Attributes:
        full: How many rows a batch of this pass has; 0 before the first one.

    Example:
        >>> padding = Padding(True)
        >>> padding.pad((torch.zeros(3), torch.zeros(3)))[1]
        3
        >>> padding.pad((torch.tensor([1.0, 2.0]), torch.tensor([0, 1])))
        ((tensor([1., 2., 2.]), tensor([0, 1, 1])), 2)
    """

    def __init__(self, is_on: bool, parts: int = 1) -> None:
        self.is_on = is_on
        self.parts = parts
        self.full = 0

    def begin(self) -> None:
        """A pass over data begins: its first batch says how many rows a batch has."""
        self.full = 0

    def pad(self, batch: Any) -> tuple[Any, int | None]:
        """The batch with as many rows as it needs, and how many of them are real; None if nothing is padded."""
        if not self.is_on and self.parts == 1:
            return batch, None
        rows = rows_of(batch)
        wanted = -(-rows // self.parts) * self.parts
        if self.is_on:
            wanted = self.full = max(self.full, wanted)
        missing = wanted - rows
        if not missing:
            return batch, rows if self.is_on else None

        def longer(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != rows:
                return tensor
            return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])

        return map_tensors(longer, batch), rows
