"""Epochs over any data: exactly its batches, and clear words when it runs dry."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from xlatrainer.data.epoch_iterator import EpochIterator


class Counting:
    """Notes how many batches were drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for batch in range(3):
            self.drawn += 1
            yield batch


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 99  # what it says is not relied upon

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def test_exactly_the_batches_it_has() -> None:
    data = Counting()
    epochs = EpochIterator(data, epochs=2)
    assert epochs.num_batches is None
    assert list(epochs) == list(epochs) == [(0, 0), (1, 1), (2, 2)]
    assert data.drawn == 6
    for _ in epochs:
        break
    assert data.drawn == 7


def test_number_of_batches() -> None:
    dataset = TensorDataset(torch.zeros(10))
    assert EpochIterator(DataLoader(dataset, batch_size=4)).num_batches == 3
    assert EpochIterator(DataLoader(dataset, batch_size=4, drop_last=True)).num_batches == 2
    assert EpochIterator([1, 2]).num_batches == 2
    assert EpochIterator(DataLoader(Stream(10), batch_size=4)).num_batches is None


def test_data_without_batches() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(3)), batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match=r"data \(DataLoader\) yielded no batch. Is its dataset empty, or shorter"):
        list(EpochIterator(loader))


def test_an_iterator_has_one_epoch() -> None:
    with pytest.raises(ValueError, match=r"x is a list_iterator, which can be gone through once, but 3 epochs"):
        EpochIterator(iter([1]), argument="x", epochs=3)
    once = EpochIterator(iter([1, 2]))
    assert list(once) == [(0, 1), (1, 2)]
    with pytest.raises(ValueError, match="was used up before; make a new one"):
        list(once)
