"""Objects that hand out batches by number."""

from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from xlatrainer.data.sequences import SequenceBatches, is_sequence


class Counted:
    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ends = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> int:
        self.asked.append(number)
        return number

    def on_epoch_end(self) -> None:
        self.ends += 1


def test_a_pass() -> None:
    sequence = Counted()
    batches = SequenceBatches(sequence)
    assert list(batches) == list(batches) == [0, 1, 2]
    assert (sequence.asked, sequence.ends, batches.num_batches) == ([0, 1, 2] * 2, 2, 3)


def test_shuffled() -> None:
    torch.manual_seed(0)
    orders = [tuple(SequenceBatches(Counted(), shuffle=True)) for _ in range(5)]
    assert len(set(orders)) > 1
    assert all(sorted(order) == [0, 1, 2] for order in orders)


def test_a_number_of_batches_of_its_own() -> None:
    class Endless(Counted):
        num_batches: int | None = None

    endless = Endless()
    assert list(islice(SequenceBatches(endless), 5)) == [0, 1, 2, 3, 4]
    endless.num_batches = 2
    assert list(SequenceBatches(endless)) == [0, 1]


def test_what_is_a_sequence() -> None:
    class Iterated(Counted):
        def __iter__(self) -> Any:
            return iter(())

    class Plain:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, number: int) -> int:
            return number

        def __iter__(self) -> Any:
            return iter(())

    assert is_sequence(Counted())
    assert is_sequence(Iterated())
    assert not any(map(is_sequence, (Plain(), [1], (1,), range(3), DataLoader(TensorDataset(torch.zeros(1))))))
