"""Each process's part of a batch: the batches of all processes together are those of one.

A batch is the global one, whatever the number of processes: its rows, padded to equal parts with copies of the last,
are split in order. A DataLoader over a dataset that can be indexed loads a process's own rows only; of other data each
process draws the whole batches and takes its rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from xlatrainer.data.position import is_deterministic

__all__ = ["PartOfBatch", "share_of"]


@dataclass(frozen=True)
class PartOfBatch:
    """The rows of a batch that belong to this process.

    Attributes:
        batch: In whatever form.
        rows: How many real ones the whole batch has, those of other processes included; None if all are real and the
            data has been split by its own sampler.
    """

    batch: Any
    rows: int | None


def share_of(batches: Iterable[Any], index: int, count: int, parts: int) -> Iterable[Any]:
    """What yields the parts of process `index` of `count`; `batches` itself if it has to be drawn whole.

    Args:
        batches: A DataLoader, or anything else.
        index: Of this process.
        count: Of processes.
        parts: What the rows of a batch must be a multiple of, a multiple of `count`.
    """
    if count == 1 or type(batches) is not DataLoader or isinstance(batches.dataset, IterableDataset):
        return batches
    if batches.batch_sampler is None:
        return batches
    collate: Callable[[Any], Any]
    dataset: Any
    sampler: Any
    if isinstance(getattr(batches.batch_sampler, "sampler", None), DistributedSampler):
        sampler, dataset, collate = batches.batch_sampler, batches.dataset, _AllReal(batches.collate_fn)
    else:
        sampler = _PartSampler(batches.batch_sampler, index, count, parts)
        dataset, collate = _PartDataset(batches.dataset), _CollatePart(batches.collate_fn)
    shared = copy.copy(batches)
    # a DataLoader forbids these assignments
    vars(shared).update(dataset=dataset, batch_sampler=sampler, collate_fn=collate)
    return shared


class _Indices(list[int]):
    """The indices of a process's rows, with the number of real rows in the whole batch."""

    rows = 0


class _PartSampler:
    """A batch sampler that gives a process's part of each batch of another."""

    def __init__(self, batches: Any, index: int, count: int, parts: int) -> None:
        self.batches = batches
        self.sampler = getattr(batches, "sampler", None)
        self.index, self.count, self.parts = index, count, parts

    def __iter__(self) -> Iterator[_Indices]:
        for batch in self.batches:
            indices = list(batch)
            rows = len(indices)
            indices += indices[-1:] * (-rows % self.parts)
            own = len(indices) // self.count
            part = _Indices(indices[self.index * own : (self.index + 1) * own])
            part.rows = rows
            yield part

    def __len__(self) -> int:
        return len(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler that gives the batches."""
        if callable(getattr(self.batches, "set_epoch", None)):
            self.batches.set_epoch(epoch)


@dataclass
class _Samples:
    samples: list[Any]
    rows: int


class _PartDataset(Dataset[Any]):
    """A dataset that is asked for the rows of a `_PartSampler`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: _Indices) -> _Samples:
        own = getattr(self.dataset, "__getitems__", None)
        samples = own(list(indices)) if callable(own) else [self.dataset[index] for index in indices]
        return _Samples(samples, indices.rows)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def is_deterministic(self) -> bool:
        """See `position.is_deterministic`."""
        return is_deterministic(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset."""
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)


@dataclass
class _CollatePart:
    """Makes a part of what a `_PartDataset` gives; can be sent to a loader's workers."""

    collate: Callable[[Any], Any]

    def __call__(self, given: _Samples) -> PartOfBatch:
        return PartOfBatch(self.collate(given.samples), given.rows)


@dataclass
class _AllReal:
    """Makes a part of a batch that its sampler has split."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> PartOfBatch:
        return PartOfBatch(self.collate(samples), None)
