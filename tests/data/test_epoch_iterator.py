"""Epochs over any data: exactly its batches, and clear words when it runs dry."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from xlatrainer.data.batch import Batch
from xlatrainer.data.epoch_iterator import EpochIterator


class Counting:
    """Notes how many batches were drawn."""

    def __init__(self, batches: int = 3) -> None:
        self.batches = batches
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for batch in range(self.batches):
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
    assert list(epochs) == [(0, 0), (1, 1), (2, 2)]


def numbers(epochs: EpochIterator) -> list[int]:
    return [batch for _, batch in epochs]


def test_steps_go_on_from_epoch_to_epoch() -> None:
    data = Counting()
    epochs = EpochIterator(data, epochs=3, steps=2)
    assert epochs.num_batches == 2
    assert [list(epochs) for _ in range(3)] == [[(0, 0), (1, 1)], [(0, 2), (1, 0)], [(0, 1), (1, 2)]]
    assert data.drawn == 6


def test_an_epoch_has_never_more_than_all_of_the_data() -> None:
    epochs = EpochIterator([0, 1, 2], epochs=3, steps=5)
    with pytest.warns(UserWarning, match=r"^steps_per_epoch=5, but all of data are 3 batches: an epoch ends") as seen:
        assert [numbers(epochs) for _ in range(3)] == [[0, 1, 2]] * 3
    assert len(seen) == 1
    exact = EpochIterator([0, 1, 2], epochs=3, steps=3)
    assert [numbers(exact) for _ in range(3)] == [[0, 1, 2]] * 3


def test_validation_starts_anew_each_time() -> None:
    data = Counting()
    epochs = EpochIterator(data, epochs=3, steps=2, restarts=True)
    assert [numbers(epochs) for _ in range(3)] == [[0, 1]] * 3
    assert data.drawn == 6


def test_limits() -> None:
    assert [numbers(EpochIterator(range(10), limit=limit)) for limit in (3, 99)] == [[0, 1, 2], list(range(10))]
    for limit, count in ((0.35, 3), (0.01, 1), (1.0, 10)):
        limited = EpochIterator(range(10), limit=limit, epochs=2)
        assert limited.num_batches == count
        assert numbers(limited) == numbers(limited) == list(range(count))
    assert numbers(EpochIterator(range(10), limit=2, steps=5)) == [0, 1]


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        (0, ValueError, "at least 1, got 0"),
        (0.0, ValueError, r"above 0.0 up to 1.0; got 0.0"),
        (1.5, ValueError, "got 1.5"),
        (True, TypeError, "got True"),
        ("1", TypeError, "got '1'"),
    ],
)
def test_wrong_limits(limit: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EpochIterator([1, 2], limit=limit)


def test_a_part_of_unknown_length() -> None:
    with pytest.raises(ValueError, match=r"x does not say how many batches it has; give the limit as an int, not 0.5"):
        EpochIterator(Counting(), argument="x", limit=0.5)


def test_data_without_end() -> None:
    with pytest.raises(ValueError, match=r"x \(cycle\) never ends: say how many batches, validation_steps=..."):
        EpochIterator(itertools.cycle([0, 1]), argument="x", steps_name="validation_steps")
    epochs = EpochIterator(itertools.cycle([0, 1]), epochs=3, steps=3)
    assert [numbers(epochs) for _ in range(3)] == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    with pytest.raises(ValueError, match="steps_per_epoch must be at least 1, got 0"):
        EpochIterator([1], steps=0)


def test_what_begins_is_told_its_number() -> None:
    class Told(Counting):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = Told()
    epochs = EpochIterator(data, epochs=2)
    assert epochs.begin_epoch(4)
    assert data.epoch == 4


def test_batches_are_prepared_and_dataclasses_taken_apart() -> None:
    @dataclass
    class Sample:
        inputs: int
        targets: int

    assert numbers(EpochIterator([1, 2], prepare=lambda batch: 10 * batch)) == [10, 20]
    assert numbers(EpochIterator([Sample(1, 2)])) == [Batch(1, 2)]


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
    with pytest.raises(
        ValueError, match=r"x is a list_iterator, which can be gone through once, but 3 epochs .* Pass s"
    ):
        EpochIterator(iter([1]), argument="x", epochs=3)
    once = EpochIterator(iter([1, 2]))
    assert list(once) == [(0, 1), (1, 2)]
    with pytest.raises(ValueError, match="was used up before; make a new one"):
        list(once)


def drawn_from(batches: int, steps: int) -> tuple[list[list[int]], int]:
    """What the epochs of an iterator were, of at most 5, and how many batches it was asked for."""
    data = Counting(batches)
    epochs = EpochIterator(iter(data), argument="x", epochs=5, steps=steps)
    return [numbers(epochs) for epoch in range(5) if epochs.begin_epoch(epoch)], data.drawn


def test_an_iterator_goes_on_where_it_stopped() -> None:
    assert drawn_from(10, 2) == ([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], 10)
    assert drawn_from(99, 2)[1] == 10  # not one more than was asked for


def test_an_iterator_that_ends_in_an_epoch() -> None:
    with pytest.warns(UserWarning, match=r"^x ran out after 1 of the 3 batches that steps_per_epoch asks for") as seen:
        assert drawn_from(4, 3) == ([[0, 1, 2], [3]], 4)
    assert len(seen) == 1


def test_an_iterator_that_ends_between_epochs() -> None:
    with pytest.warns(UserWarning, match=r"^x ran out after 4 batches: there is no epoch 3$") as seen:
        assert drawn_from(4, 2) == ([[0, 1], [2, 3]], 4)
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["restarts", "goes on", "iterator"])
def test_going_on_in_another_process(kind: str) -> None:
    """A state saved after each batch, and between epochs, leads to the same batches afterwards."""

    def epochs_of() -> EpochIterator:
        torch.manual_seed(0)
        loader = DataLoader(torch.arange(10), batch_size=2, shuffle=True)
        data = iter(loader) if kind == "iterator" else loader
        steps = None if kind == "restarts" else 2 if kind == "iterator" else 3
        return EpochIterator(data, epochs=2, steps=steps)

    def run(epochs: EpochIterator, first: int, states: list[Any]) -> list[list[int]]:
        seen = []
        for epoch in range(first, 2):
            epochs.begin_epoch(epoch)
            for index, batch in epochs:
                seen.append([epoch, index, *batch.tolist()])
                states.append((epoch, len(seen), epochs.state_dict(index + 1)))
            states.append((epoch + 1, len(seen), epochs.state_dict(None)))
        return seen

    states: list[Any] = []
    expected = run(epochs_of(), 0, states)
    for epoch, count, state in states:
        if kind == "iterator":
            torch.manual_seed(0)
        again = epochs_of()
        again.load_state_dict(state)
        assert expected[count:] == (run(again, epoch, []) if count < len(expected) else [])
