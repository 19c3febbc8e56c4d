"""`SequenceBatches`: objects that hand out batches by number, as Keras's `Sequence` and `PyDataset` do."""

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["SequenceBatches", "is_sequence"]


class SequenceBatches:
    """Gone through once an epoch: `sequence[0]`, `sequence[1]`, ... up to its length, in a new order if shuffled.

    Args:
        sequence: Has `__getitem__(number)`, which gives a batch, and `__len__` or `num_batches`; its
            `on_epoch_end()`, if it has one, is called at the end of each pass. A `num_batches` of None says that it
            never ends.
        shuffle: Whether to draw a new order of the batches for each pass, from torch's CPU generator. Default False.

    Example:
        >>> class Squares:
        ...     def __len__(self):
        ...         return 3
        ...
        ...     def __getitem__(self, number):
        ...         return number**2
        >>> list(SequenceBatches(Squares()))
        [0, 1, 4]
    """

    def __init__(self, sequence: Any, shuffle: bool = False) -> None:
        self.dataset = sequence
        self.shuffle = shuffle

    @property
    def num_batches(self) -> int | None:
        """How many there are, or None if they never end."""
        if hasattr(self.dataset, "num_batches"):
            number = self.dataset.num_batches
            return None if number is None else int(number)
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        number = self.num_batches
        if number is None:
            index = 0
            while True:
                yield self.dataset[index]
                index += 1
        order = torch.randperm(number).tolist() if self.shuffle else range(number)
        for index in order:
            yield self.dataset[index]
        if hasattr(self.dataset, "on_epoch_end"):
            self.dataset.on_epoch_end()


def is_sequence(data: Any) -> bool:
    """Whether `data` hands out batches by number, and says how many there are, or what to do at the end of an epoch."""
    kind = type(data)
    if isinstance(data, list | tuple | str | bytes | range) or not hasattr(kind, "__getitem__"):
        return False
    counted = hasattr(kind, "__len__") or hasattr(data, "num_batches")
    return counted and (not hasattr(kind, "__iter__") or hasattr(data, "on_epoch_end"))
