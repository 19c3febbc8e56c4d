"""Going on in the middle of the data, in another process's place: the same batches, whatever the loader draws."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from xlatrainer.data.epoch_iterator import EpochIterator
from xlatrainer.data.position import ResumableBatches, is_deterministic, set_epoch
from xlatrainer.data.random_states import random_states, restore_random_states

ROWS, BATCH = 22, 4


class Noisy(Dataset[Tensor]):
    """Examples with random numbers of each kind, and a count of how many were loaded in this process."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        self.loaded += 1
        noise = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        return torch.tensor([float(index), *noise])


class OwnGenerator(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.numpy = np.random.default_rng(3)
        self.legacy = np.random.RandomState(4)
        self.python = random.Random(5)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), self.numpy.random(), self.legacy.rand(), self.python.random()])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for index in range(ROWS):
            yield torch.tensor([float(index), torch.rand(()).item()])


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(tensors(), BATCH, shuffle=True),
    "own generator": lambda: DataLoader(
        Noisy(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(torch.initial_seed())
    ),
    "noisy": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "generators of the dataset": lambda: DataLoader(OwnGenerator(), BATCH, shuffle=True),
    "with replacement": lambda: DataLoader(tensors(), BATCH, sampler=RandomSampler(range(ROWS), True)),
    "weighted": lambda: DataLoader(tensors(), BATCH, sampler=WeightedRandomSampler([1.0, 5.0] * (ROWS // 2), ROWS)),
    "batch sampler": lambda: DataLoader(
        tensors(), batch_sampler=BatchSampler(RandomSampler(range(ROWS)), BATCH, drop_last=True)
    ),
    "no batches": lambda: DataLoader(tensors(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "list": lambda: [torch.full((2,), float(index)) for index in range(6)],
    "torchdata": lambda: StatefulDataLoader(tensors(), BATCH, shuffle=True),
}
WORKERS: dict[str, Callable[[], Any]] = {
    "noisy": lambda: DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2),
    "tensors": lambda: DataLoader(tensors(), BATCH, shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(), BATCH, num_workers=2),
    "torchdata": lambda: StatefulDataLoader(tensors(), BATCH, shuffle=True, num_workers=2),
}


def epoch_of(batches: ResumableBatches) -> list[Any]:
    return [plain(batch) for batch in batches]


def plain(batch: Any) -> Any:
    if isinstance(batch, int):
        return batch
    return batch.tolist() if isinstance(batch, Tensor) else [part.tolist() for part in batch]


def compare_with_unbroken(make: Callable[[], Any], done: int, *, twice: bool = False) -> None:
    """Two and a half epochs in one go, and the same ones stopped in the second epoch, once or twice."""
    restore = random_states()
    whole = ResumableBatches(make())
    expected = [epoch_of(whole), epoch_of(whole), epoch_of(whole)]
    after = random_states()

    restore_random_states(restore)
    first = ResumableBatches(make())
    assert epoch_of(first) == expected[0]
    iterator = iter(first)
    seen = [plain(next(iterator)) for _ in range(done)]
    state = copy.deepcopy(first.state_dict(between=done == 0))
    del iterator

    resumed = continued(make, state)
    if twice:
        iterator = iter(resumed)
        seen.append(plain(next(iterator)))
        state = copy.deepcopy(resumed.state_dict())
        del iterator
        resumed = continued(make, state)
    assert seen + epoch_of(resumed) == expected[1]
    assert epoch_of(resumed) == expected[2]
    if type(first.batches) is not StatefulDataLoader:  # it draws a seed more for an iterator that is made from a state
        assert torch.equal(random_states()["torch"], after["torch"])


def continued(make: Callable[[], Any], state: Any) -> ResumableBatches:
    """As in another process: loaders made anew and random states that are none of the stopped one's."""
    torch.manual_seed(0)
    batches = ResumableBatches(make())
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    batches.load_state_dict(state)
    return batches


@pytest.mark.parametrize("done", [0, 1, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_the_batches_go_on(name: str, done: int) -> None:
    compare_with_unbroken(LOADERS[name], done)


@pytest.mark.parametrize("name", LOADERS)
def test_resumed_twice(name: str) -> None:
    compare_with_unbroken(LOADERS[name], 2, twice=True)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", WORKERS)
def test_with_workers(name: str) -> None:
    compare_with_unbroken(WORKERS[name], 3, twice=True)


@pytest.mark.multiprocess
def test_lasting_workers_repeat_the_order() -> None:
    def make() -> Any:
        return DataLoader(tensors(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)

    compare_with_unbroken(make, 3)


@pytest.mark.multiprocess
def test_random_numbers_of_lasting_workers_are_warned_about() -> None:
    def make() -> Any:
        return DataLoader(Noisy(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)

    first = ResumableBatches(make())
    epoch_of(first)
    state = first.state_dict(between=True)
    expected = [[row[0] for row in batch] for batch in epoch_of(first)]
    resumed = continued(make, state)
    with pytest.warns(UserWarning, match="persistent_workers=True: the random numbers that its workers draw go on"):
        assert [[row[0] for row in batch] for batch in epoch_of(resumed)] == expected


def test_between_two_epochs() -> None:
    for name, make in LOADERS.items():
        start = random_states()
        whole = ResumableBatches(make())
        expected = [epoch_of(whole), epoch_of(whole)]
        restore_random_states(start)
        first = ResumableBatches(make())
        epoch_of(first)
        resumed = continued(make, copy.deepcopy(first.state_dict(between=True)))
        assert epoch_of(resumed) == expected[1], name


def test_an_epoch_that_was_given_up_is_not_gone_on_with() -> None:
    batches = ResumableBatches([1, 2, 3])
    next(iter(batches))
    resumed = ResumableBatches([1, 2, 3])
    resumed.load_state_dict(batches.state_dict(between=True))
    assert list(resumed) == [1, 2, 3]


class Counting(TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.arange(ROWS))
        self.loaded: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.loaded.append(index)
        return super().__getitem__(index)


def test_what_is_known_to_be_deterministic_is_skipped_without_loading() -> None:
    class Stated(Noisy):
        is_deterministic = True

    for dataset, loads_again in ((Stated(), 0), (Noisy(), 2 * BATCH)):
        batches = ResumableBatches(DataLoader(dataset, BATCH))
        iterator = iter(batches)
        next(iterator), next(iterator)
        state = batches.state_dict()
        dataset.loaded = 0
        resumed = ResumableBatches(DataLoader(dataset, BATCH))
        resumed.load_state_dict(state)
        next(iter(resumed))
        assert dataset.loaded == loads_again + BATCH


def test_which_datasets_are_known() -> None:
    known = [tensors(), Subset(tensors(), [0]), ConcatDataset([tensors(), tensors()]), StackDataset(a=tensors())]
    unknown = [Noisy(), Subset(Noisy(), [0]), ConcatDataset([tensors(), Noisy()]), StackDataset(Noisy()), Counting()]
    assert [is_deterministic(dataset) for dataset in [*known, *unknown]] == [True] * 4 + [False] * 5
    dataset = Counting()  # a subclass may do anything
    batches = ResumableBatches(DataLoader(dataset, 1))
    next(iter(batches))
    batches.load_state_dict(batches.state_dict())
    dataset.loaded.clear()
    list(batches)
    assert dataset.loaded == list(range(ROWS))


class Stateful:
    """A loader that keeps its position itself."""

    def __init__(self) -> None:
        self.at = 0
        self.loaded_states: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded_states.append(state)
        self.at = state["at"]


def test_a_loader_with_a_state_keeps_its_position_itself() -> None:
    batches = ResumableBatches(Stateful())
    iterator = iter(batches)
    assert [next(iterator), next(iterator)] == [1, 2]
    loader = Stateful()
    resumed = ResumableBatches(loader)
    resumed.load_state_dict(batches.state_dict())
    assert list(resumed) == [3, 4, 5]
    assert list(resumed) == [1, 2, 3, 4, 5]
    assert loader.loaded_states == [{"at": 2}]


@pytest.mark.parametrize("make", [lambda: DataLoader(tensors(), BATCH, shuffle=True), Stateful])
def test_after_the_end_nothing_is_left(make: Callable[[], Any]) -> None:
    batches = ResumableBatches(make())
    list(batches)
    ended, between = (copy.deepcopy(batches.state_dict(between=flag)) for flag in (False, True))
    after = random_states()
    resumed = continued(make, ended)
    assert list(resumed) == []
    restore_random_states(after)
    assert [plain(batch) for batch in resumed] == [plain(batch) for batch in continued(make, between)]


def test_data_that_has_become_shorter() -> None:
    batches = ResumableBatches([1, 2, 3])
    iterator = iter(batches)
    next(iterator), next(iterator)
    shorter = ResumableBatches([1])
    shorter.load_state_dict(batches.state_dict())
    with pytest.raises(ValueError, match="saved after 2 batches of an epoch, but list yields 1"):
        next(iter(shorter))


def test_set_epoch_reaches_all_parts_once() -> None:
    told = []

    class Told:
        def __init__(self, name: str) -> None:
            self.name = name

        def set_epoch(self, epoch: int) -> None:
            told.append((self.name, epoch))

    class Loader(Told):
        sampler = Told("sampler")
        dataset = Told("dataset")
        batch_sampler = Told("batch sampler")

    Loader.batch_sampler.sampler = Loader.sampler  # type: ignore[attr-defined]
    set_epoch(Loader("loader"), 3)
    assert sorted(told) == [("batch sampler", 3), ("dataset", 3), ("loader", 3), ("sampler", 3)]
    set_epoch([1], 3)


def test_the_numbers_of_the_batches_go_on() -> None:
    batches = EpochIterator([10, 11, 12, 13])
    iterator = iter(batches)
    next(iterator), next(iterator)
    resumed = EpochIterator([10, 11, 12, 13])
    resumed.load_state_dict(batches.state_dict(2))
    assert list(resumed) == [(2, 12), (3, 13)]
    assert list(resumed)[0] == (0, 10)


def test_nothing_may_be_left_of_an_epoch() -> None:
    batches = EpochIterator([10, 11])
    iterator = iter(batches)
    next(iterator), next(iterator)
    resumed = EpochIterator([10, 11])
    resumed.load_state_dict(batches.state_dict(2))
    assert list(resumed) == []
    assert list(resumed) == [(0, 10), (1, 11)]
