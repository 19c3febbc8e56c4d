"""Padding of a batch: a short last one to the shape, and the program, of all others; to equal parts for the devices.

On the host, before the batch goes to the device. The rows that pad are copies of the last one, so that they are
nothing unusual to a model; loss, metrics and counts leave them out. What mixes the rows of a batch does see them: a
batch norm in train mode takes its statistics over them too.
"""

from typing import Any

import torch
from torch import Tensor

from xlatrainer.data.process_share import PartOfBatch
from xlatrainer.nested import map_tensors
from xlatrainer.trainer.steps import rows_of

__all__ = ["Padding"]


class Padding:
    """Pads batches with fewer rows than the first one of a pass over data, or with rows that do not make equal parts.

    Of several processes each gives its own part of the padded batch.

    Args:
        is_on: Whether a short batch is padded to the rows of the others.
        parts: What the rows must be a multiple of. Default 1.
        process: This process's number among those that share the batch, and how many they are. Default (0, 1).

    Attributes:
        full: How many rows a batch of this pass has; 0 before the first one.

    Example:
        >>> padding = Padding(True)
        >>> padding.pad((torch.zeros(3), torch.zeros(3)))[1]
        3
        >>> padding.pad((torch.tensor([1.0, 2.0]), torch.tensor([0, 1])))
        ((tensor([1., 2., 2.]), tensor([0, 1, 1])), 2)
    """

    def __init__(self, is_on: bool, parts: int = 1, process: tuple[int, int] = (0, 1)) -> None:
        self.is_on = is_on
        self.parts = parts
        self.index, self.count = process
        self.full = 0

    def begin(self) -> None:
        """A pass over data begins: its first batch says how many rows a batch has."""
        self.full = 0

    def pad(self, batch: Any) -> tuple[Any, int | None]:
        """This process's part of the batch with as many rows as it needs, and how many rows of the whole are real.

        None if all are, and no batch of this pass is padded to the rows of others.
        """
        if isinstance(batch, PartOfBatch):
            return self._pad_part(batch)
        if not self.is_on and self.parts == 1:
            return batch, None
        rows = rows_of(batch)
        wanted = self._wanted(rows)
        padded = _longer(batch, rows, wanted)
        if self.count > 1:
            own = wanted // self.count
            padded = _rows_between(padded, wanted, self.index * own, (self.index + 1) * own)
        return padded, rows if self.is_on or wanted > rows else None

    def _wanted(self, rows: int) -> int:
        wanted = -(-rows // self.parts) * self.parts
        if self.is_on:
            wanted = self.full = max(self.full, wanted)
        return wanted

    def _pad_part(self, part: PartOfBatch) -> tuple[Any, int | None]:
        own = rows_of(part.batch)
        if part.rows is None:
            if own * self.count % self.parts:
                raise ValueError(
                    f"each of {self.count} processes has {own} rows of a batch, which its "
                    f"{self.parts // self.count} devices do not divide: choose another batch size, or leave the "
                    f"sampler out, so that the Trainer splits and pads the batches"
                )
            return part.batch, None
        wanted = self._wanted(max(part.rows, 1))
        return _longer(part.batch, own, wanted // self.count), (part.rows if self.is_on or wanted > part.rows else None)


def _longer(batch: Any, rows: int, wanted: int) -> Any:
    """The batch with copies of its last row behind it."""
    if wanted <= rows:
        return batch

    def longer(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(wanted - rows, *tensor.shape[1:])])

    return map_tensors(longer, batch)


def _rows_between(batch: Any, rows: int, first: int, end: int) -> Any:
    return map_tensors(lambda tensor: tensor[first:end] if tensor.dim() and tensor.shape[0] == rows else tensor, batch)
