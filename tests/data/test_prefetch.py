"""Batches prepared ahead by threads: in order, each once, errors in their place, and no thread that stays."""

import copy
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from xlatrainer.data.prefetch import Prefetched, checked_count
from xlatrainer.data.random_states import host_random_states, restore_random_states

ROWS, BATCH = 22, 4


def prefetched(source: Any, move: Callable[[Any], Any] = lambda batch: batch, movers: int = 1) -> Prefetched:
    return Prefetched(source, move, 3, 2, movers)


def own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("xlatrainer"))


def ended_within(seconds: float = 1.0) -> bool:
    """Whether the threads are gone after so long; workers are given more, on a machine with much to do."""
    until = time.monotonic() + seconds
    while own_threads() and time.monotonic() < until:
        time.sleep(0.01)
    return not own_threads()


class Failing(Dataset[int]):
    """Fails at one index, or kills its process there."""

    def __init__(self, at: int, kill: bool = False) -> None:
        self.at = at
        self.kill = kill

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        if index == self.at and self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.at:
            raise KeyError(f"no example {index}")
        return index


@pytest.mark.parametrize("movers", [1, 4])
def test_in_order_each_once_and_again(movers: int) -> None:
    def move(batch: int) -> int:
        time.sleep(random.random() / 500)  # so that one that began later may be done earlier
        return batch * 10

    batches = prefetched(range(50), move, movers)
    assert list(batches) == list(batches) == [10 * number for number in range(50)]
    assert len(batches) == 50
    assert own_threads() == []


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader(workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(ROWS)), BATCH, num_workers=workers)
    assert [batch[0].tolist() for batch in prefetched(loader)] == [batch[0].tolist() for batch in loader]


def test_it_draws_no_further_than_the_limits() -> None:
    drawn: list[int] = []

    def source() -> Iterator[int]:
        for number in range(100):
            drawn.append(number)
            yield number

    moved: list[int] = []
    iterator = iter(Prefetched(source(), lambda batch: moved.append(batch) or batch, 3, 2))
    for taken in range(5):
        next(iterator)
        until = time.monotonic() + 5
        while len(drawn) < taken + 1 + 5 and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(0.02)  # it would go on now
        assert (len(drawn), len(moved)) == (taken + 1 + 5, taken + 1 + 2)
    iterator.close()


def test_an_error_of_the_source_comes_in_its_place_with_its_traceback() -> None:
    iterator = iter(prefetched(DataLoader(Failing(9), BATCH)))
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(KeyError, match="no example 9") as caught:
        next(iterator)
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert list(iterator) == []
    assert ended_within()


@pytest.mark.multiprocess
def test_an_error_of_a_worker() -> None:
    iterator = iter(prefetched(DataLoader(Failing(9), BATCH, num_workers=2)))
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(KeyError, match=r"(?s)in DataLoader worker process.*__getitem__.*no example 9"):
        next(iterator)
    assert ended_within(3.0)


# torch's handler of SIGCHLD may raise inside a destructor, where Python ignores it; the DataLoader raises once more.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.multiprocess
def test_a_dead_worker_is_an_error() -> None:
    iterator = iter(prefetched(DataLoader(Failing(9, kill=True), BATCH, num_workers=2)))
    with pytest.raises(RuntimeError, match="worker"):
        list(iterator)
    del iterator
    assert ended_within(3.0)


@pytest.mark.parametrize("movers", [1, 3])
def test_an_error_of_the_move_comes_in_its_place(movers: int) -> None:
    def move(batch: int) -> int:
        if batch == 2:
            raise MemoryError("the device is full")
        return batch

    iterator = iter(prefetched(range(10), move, movers))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(MemoryError, match="the device is full") as caught:
        next(iterator)
    assert "move" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert ended_within()


def test_stop_iteration_of_the_move_is_no_end() -> None:
    def move(batch: int) -> int:
        return next(iter(()))

    with pytest.raises(RuntimeError, match=r"moving a batch raised StopIteration\(\)"):
        list(prefetched([1, 2], move))


def test_an_error_when_the_iterator_is_made() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no such data")

    with pytest.raises(OSError, match="no such data"):
        list(prefetched(Broken()))
    assert own_threads() == []


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["break", "drop", "close", "close the loader", "garbage", "again"])
def test_the_threads_end(how: str, workers: int) -> None:
    batches = prefetched(DataLoader(TensorDataset(torch.arange(400)), 2, num_workers=workers))
    if how == "break":
        for _ in batches:
            break
    iterator = iter(batches)
    next(iterator)
    assert len(own_threads()) >= 2
    if how in ("break", "drop"):
        del iterator
    elif how == "close":
        iterator.close()
    elif how == "close the loader":
        batches.close()
    elif how == "again":
        assert len(list(batches)) == 200
    else:
        knot: list[Any] = [iterator]
        knot.append(knot)
        del iterator, knot
        gc.collect()
    assert ended_within(3.0 if workers else 1.0)
    if how in ("close", "close the loader", "again"):
        with pytest.raises(
            RuntimeError, match="there are no batches any more in this pass: (it was closed|another one)"
        ):
            next(iterator)


@pytest.mark.multiprocess
def test_lasting_workers_serve_the_next_pass() -> None:
    loader = DataLoader(TensorDataset(torch.arange(ROWS)), BATCH, num_workers=2, persistent_workers=True)
    expected = [rows.tolist() for rows in torch.arange(ROWS).split(BATCH)]
    batches = prefetched(loader)
    for _ in range(3):
        for _ in batches:
            break
        assert [batch[0].tolist() for batch in batches] == expected
    assert [batch[0].tolist() for batch in loader] == expected


def test_what_was_prepared_is_let_go_of() -> None:
    class Big:
        pass

    made: list[weakref.ref[Big]] = []

    def move(_: int) -> Big:
        big = Big()
        made.append(weakref.ref(big))
        return big

    batches = prefetched(range(100), move)
    for _ in batches:
        break
    assert ended_within()
    del _
    assert [ref for ref in made if ref() is not None] == []


def test_a_second_pass_ends_the_first() -> None:
    batches = prefetched(range(10))
    first = iter(batches)
    assert next(first) == 0
    second = iter(batches)
    assert next(second) == 0
    with pytest.raises(RuntimeError, match="another one over the same loader has begun. Wrap the loader twice"):
        next(first)
    assert list(second) == list(range(1, 10))


def test_a_forked_child_is_told() -> None:
    iterator = iter(prefetched(range(10)))
    next(iterator)
    pid = os.fork()
    if pid == 0:
        try:
            next(iterator)
        except RuntimeError as error:
            os._exit(7 if "threads of the parent process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    iterator.close()


def test_a_process_that_ends_in_the_midst() -> None:
    """It, and a child that it has forked."""
    program = textwrap.dedent(
        """
        import os, time, warnings
        from xlatrainer.data.prefetch import Prefetched
        warnings.simplefilter("ignore")  # jax's, of forks
        kept = iter(Prefetched(range(1000), lambda b: time.sleep(0.01) or b, 8, 4, 2))
        print(next(kept), flush=True)
        pid = os.fork()
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
        """
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\n", "")


@pytest.mark.parametrize("value", [0, -1, True, 1.5, None])
def test_counts_are_checked(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="moved_limit must be"):
        checked_count("moved_limit", value)


# positions


class Noisy(Dataset[list[float]]):
    """Examples with random numbers of each kind."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), random.random(), float(np.random.rand()), torch.rand(()).item()])


LOADERS: dict[str, Callable[[], Any]] = {
    "noisy": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "tensors": lambda: DataLoader(TensorDataset(torch.arange(ROWS)), BATCH, shuffle=True),
    "generator": lambda: DataLoader(
        TensorDataset(torch.arange(ROWS)), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "list": lambda: [torch.full((2,), float(index)) for index in range(6)],
    "stateful": lambda: StatefulDataLoader(TensorDataset(torch.arange(ROWS)), BATCH, shuffle=True),
}
WORKERS: dict[str, Callable[[], Any]] = {
    "noisy": lambda: DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2),
    "stateful": lambda: StatefulDataLoader(TensorDataset(torch.arange(ROWS)), BATCH, shuffle=True, num_workers=2),
}


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [part.tolist() for part in batch]


def check_resumption(make: Callable[[], Any], done: int) -> None:
    start = host_random_states()
    whole = prefetched(make())
    expected = [[plain(batch) for batch in whole] for _ in range(3)]

    restore_random_states(start)
    first = prefetched(make())
    assert [plain(batch) for batch in first] == expected[0]
    iterator = iter(first)
    seen = [plain(next(iterator)) for _ in range(done)]
    time.sleep(0.02)  # the threads are ahead
    state = copy.deepcopy(first.state_dict())
    iterator.close()

    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    resumed = prefetched(make())
    resumed.load_state_dict(state)
    iterator = iter(resumed)
    seen.append(plain(next(iterator)))  # and once more
    state = copy.deepcopy(resumed.state_dict())
    iterator.close()
    resumed = prefetched(make())
    resumed.load_state_dict(state)
    assert seen + [plain(batch) for batch in resumed] == expected[1]
    assert [plain(batch) for batch in resumed] == expected[2]


@pytest.mark.parametrize("done", [0, 1, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_it_goes_on_exactly(name: str, done: int) -> None:
    check_resumption(LOADERS[name], done)


def test_global_random_numbers_of_a_loader_that_keeps_its_position() -> None:
    check_resumption(lambda: StatefulDataLoader(Noisy(), BATCH, shuffle=True), 2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", WORKERS)
def test_it_goes_on_exactly_with_workers(name: str) -> None:
    check_resumption(WORKERS[name], 2)


def test_a_position_at_the_end_is_that_of_the_next_pass() -> None:
    for name, make in LOADERS.items():
        start = host_random_states()
        whole = prefetched(make())
        expected = [[plain(batch) for batch in whole] for _ in range(2)]
        restore_random_states(start)
        first = prefetched(make())
        list(first)
        state = copy.deepcopy(first.state_dict())
        torch.manual_seed(99), random.seed(99), np.random.seed(99)
        resumed = prefetched(make())
        resumed.load_state_dict(state)
        assert [plain(batch) for batch in resumed] == expected[1], name


def test_set_epoch_reaches_the_sampler() -> None:
    class Sampler:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Loader(list[int]):
        sampler = Sampler()

    prefetched(Loader()).set_epoch(3)
    assert Loader.sampler.epochs == [3]
