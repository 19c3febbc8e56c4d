"""Padding of a short last batch, so that it has the shape, and the program, of all others.

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
    """Pads batches with fewer rows than the first one of a pass over data.

    Args:
        is_on: Whether it pads at all.

    Attributes:
        full: How many rows a batch of this pass has; 0 before the first one.

    Example:
        >>> padding = Padding(True)
        >>> padding.pad((torch.zeros(3), torch.zeros(3)))[1]
        3
        >>> padding.pad((torch.tensor([1.0, 2.0]), torch.tensor([0, 1])))
        ((tensor([1., 2., 2.]), tensor([0, 1, 1])), 2)
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.full = 0

    def begin(self) -> None:
        """A pass over data begins: its first batch says how many rows a batch has."""
        self.full = 0

    def pad(self, batch: Any) -> tuple[Any, int | None]:
        """The batch with as many rows as the first one, and how many of them are real; None if nothing is padded."""
        if not self.is_on:
            return batch, None
        rows = rows_of(batch)
        self.full = max(self.full, rows)
        missing = self.full - rows
        if not missing:
            return batch, rows

        def longer(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != rows:
                return tensor
            return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])])

        return map_tensors(longer, batch), rows
