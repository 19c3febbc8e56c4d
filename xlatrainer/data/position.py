"""`ResumableBatches`: goes through data and knows where it is, so that another process can go on from there.

What a loader yields depends on the random states at the moment when its iterator is made and on how many batches were
drawn since. Both are remembered; to go on, the states are put back, the iterator is made anew, the same number of
batches is drawn and dropped, and the states are set to those at the moment of the save.

Owns nothing of epochs: one position is that of one iterator.
"""

import copy
import random
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from xlatrainer.backend._private_api import has_lasting_workers, interruptible, shut_down_workers
from xlatrainer.data.random_states import host_random_states, random_states, restore_random_states

__all__ = ["ResumableBatches", "is_deterministic", "set_epoch"]


class ResumableBatches:
    """An iterable over `batches` with a state.

    A loader with `state_dict` and `load_state_dict` keeps its position itself. In every other case the batches before
    the position are drawn again, which repeats also what a dataset draws at random. They are skipped without being
    loaded where the examples are known not to depend on how often the dataset was asked: in a `TensorDataset` and its
    subsets, and in any map-style dataset with a true attribute `is_deterministic`.

    What another thread draws ahead (`reads_ahead`) has the host's random states to itself while it does: they are put
    back before it begins, and left as it leaves them.

    Args:
        batches: A DataLoader or another iterable of batches.
        ahead: Whether this is drawn ahead, by another thread than that which trains. The device's random state is then
            none of its business. Default False.

    Example:
        >>> first, second = ResumableBatches([1, 2, 3]), ResumableBatches([1, 2, 3])
        >>> iterator = iter(first)
        >>> next(iterator), next(iterator)
        (1, 2)
        >>> second.load_state_dict(first.state_dict())
        >>> list(second), list(second)
        ([3], [1, 2, 3])
    """

    def __init__(self, batches: Iterable[Any], *, ahead: bool = False) -> None:
        self.batches = batches
        self._is_ahead = ahead
        self._begun: dict[str, Any] | None = None
        self._drawn = 0
        self._was_alive = False
        self._ended = False
        self._resumed: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        yield from self.begun()

    def begun(self, is_given_up: Callable[[], bool] = lambda: False) -> Generator[Any, None, None]:
        """As `iter`, with the iterator of the batches made now, and not when the first one is drawn.

        Args:
            is_given_up: Asked while a worker of a DataLoader is waited for: true ends the wait, with an error. Default
                never.
        """
        resumed, self._resumed = self._resumed, None
        self._ended = False
        iterator: Iterator[Any] = iter(())
        if resumed is not None and resumed["begun"] is not None:
            self._begun, self._drawn, self._was_alive = resumed["begun"], resumed["drawn"], resumed["was_alive"]
            if resumed["ended"]:
                self._prepare(resumed)
            else:
                iterator = self._reopened(resumed)
        else:
            if resumed is not None:
                self._prepare(resumed)
            self._was_alive = _keeps_workers(self.batches)
            self._begun, self._drawn = self._states(), 0
            iterator = iter(self.batches)
        return self._rest_of(iterator, is_given_up)

    def _rest_of(self, iterator: Iterator[Any], is_given_up: Callable[[], bool]) -> Generator[Any, None, None]:
        try:
            with interruptible(iterator, is_given_up):
                for batch in iterator:
                    self._drawn += 1
                    yield batch
        except (ConnectionError, EOFError) as error:
            if getattr(self.batches, "num_workers", 0):
                raise RuntimeError(
                    f"a worker process of the {type(self.batches).__name__} ended while it handed over a batch: it "
                    f"crashed or was killed, by the system for want of memory perhaps"
                ) from error
            raise
        finally:
            shut_down_workers(iterator)
        self._ended = True

    def state_dict(self, *, between: bool = False) -> dict[str, Any]:
        """The position: plain data and CPU tensors.

        Args:
            between: The iterator is given up: the next one starts at the beginning. Default False.
        """
        if self._resumed is not None:
            return dict(self._resumed)  # nothing was drawn since it was loaded
        begun = None if between or not self._drawn else self._begun
        given_up = between and self._drawn > 0 and not self._ended
        return {
            "begun": begun,
            "drawn": self._drawn if begun is not None else 0,
            "ended": self._ended and begun is not None,
            "was_alive": self._was_alive if begun is not None else _keeps_workers(self.batches),
            "is_alive": _keeps_workers(self.batches),
            "now": self._states(),
            "loader": None if given_up else _own_state(self.batches),
        }

    def own_position(self) -> Any:
        """Where a loader that keeps its position itself is now, with the random states; None for all others."""
        loader = _own_state(self.batches)
        return None if loader is None else {"loader": copy.deepcopy(loader), "now": self._states()}

    def state_after(self, drawn: int, own: Any) -> dict[str, Any]:
        """The position after so many batches of the pass that was begun, whatever was drawn ahead of them.

        Args:
            drawn: How many.
            own: `own_position` after them.
        """
        return {
            "begun": self._begun if drawn else None,
            "drawn": drawn,
            "ended": False,
            "was_alive": self._was_alive,
            "is_alive": self._was_alive,
            **({"loader": None, "now": self._begun} if own is None else own),
        }

    @property
    def drawn(self) -> int:
        """How many batches of the pass were drawn."""
        return self._drawn

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where `state` says. Sets the random states, now and when batches are dropped."""
        self._resumed = state
        self._restore(state["now"])

    def give_up(self) -> None:
        """The pass is over, wherever it was: the next iterator starts at the beginning, after `load_state_dict` too."""
        if self._resumed is not None:
            self._resumed = {**self._resumed, "begun": None, "drawn": 0, "ended": False, "loader": None}

    def _states(self) -> dict[str, Any]:
        own = {name: _generator_state(generator) for name, generator in _generators(self.batches).items()}
        return {"global": host_random_states() if self._is_ahead else random_states(), "own": own}

    def _restore(self, states: Mapping[str, Any]) -> None:
        restore_random_states(states["global"])
        for name, generator in _generators(self.batches).items():
            if name in states["own"]:
                _restore_generator(generator, states["own"][name])

    def _prepare(self, resumed: Mapping[str, Any]) -> None:
        """Bring the loader to where it was between two iterators."""
        if resumed["is_alive"]:
            before = self._states()
            _start_workers(self.batches)
            self._restore(before)
        if resumed["loader"] is not None:
            self.batches.load_state_dict(resumed["loader"])  # type: ignore[attr-defined]  # it wrote that state

    def _reopened(self, resumed: Mapping[str, Any]) -> Iterator[Any]:
        if resumed["was_alive"]:
            _start_workers(self.batches)
        self._restore(resumed["begun"])
        if resumed["loader"] is not None:
            self.batches.load_state_dict(resumed["loader"])  # type: ignore[attr-defined]  # it wrote that state
            iterator = iter(self.batches)
        elif _may_skip(self.batches):
            iterator = _without_first(self.batches, resumed["drawn"])
        else:
            iterator = iter(self.batches)
            dropped = sum(1 for _ in islice(iterator, resumed["drawn"]))
            if dropped < resumed["drawn"]:
                raise ValueError(
                    f"the checkpoint was saved after {resumed['drawn']} batches of an epoch, but "
                    f"{type(self.batches).__name__} yields {dropped}. Resume with the data that the training had"
                )
        if getattr(self.batches, "reads_ahead", False):
            restore_random_states({"xla": resumed["now"]["global"]["xla"]})  # the others are in use
        elif not self._is_ahead or resumed["loader"] is not None:
            self._restore(resumed["now"])
        return iterator


def set_epoch(batches: Any, epoch: int) -> None:
    """Call `set_epoch(epoch)` on a loader, its sampler, its batch sampler and its dataset, where they have it."""
    told: list[Any] = []
    for _, part in _parts(batches):
        if callable(getattr(part, "set_epoch", None)) and not any(part is other for other in told):
            part.set_epoch(epoch)
            told.append(part)


def _parts(batches: Any) -> Iterator[tuple[str, Any]]:
    """A loader and what decides on its batches, by name."""
    yield "loader", batches
    for name in ("sampler", "batch_sampler", "dataset"):
        part = getattr(batches, name, None)
        if part is not None:
            yield name, part
            inner = getattr(part, "sampler", None)
            if inner is not None:
                yield f"{name}.sampler", inner


def _generators(batches: Any) -> dict[str, Any]:
    """The random generators that a loader and its parts hold as attributes, each once."""
    found: dict[str, Any] = {}
    for name, part in _parts(batches):
        for attribute, value in getattr(part, "__dict__", {}).items():
            known = isinstance(value, random.Random | np.random.Generator | np.random.RandomState)
            known = known or (isinstance(value, torch.Generator) and value.device.type == "cpu")
            if known and not any(value is other for other in found.values()):
                found[f"{name}.{attribute}"] = value
    return found


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _restore_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _own_state(batches: Any) -> Any:
    """The state of a loader that keeps its position itself; None for all others."""
    if callable(getattr(batches, "state_dict", None)) and callable(getattr(batches, "load_state_dict", None)):
        return batches.state_dict()
    return None


def _keeps_workers(batches: Any) -> bool:
    """Whether worker processes are there that the next iteration uses again, and so draws no seed for."""
    return isinstance(batches, DataLoader) and has_lasting_workers(batches)


def _start_workers(batches: Any) -> None:
    """Start lasting workers before the random states are put back, since their start draws a seed."""
    if isinstance(batches, DataLoader) and batches.persistent_workers and not _keeps_workers(batches):
        iter(batches)
        if not is_deterministic(batches.dataset):
            warnings.warn(
                "the DataLoader has persistent_workers=True: the random numbers that its workers draw go on from epoch "
                "to epoch and are not those of the training that was stopped. The order of the examples is. Use "
                "persistent_workers=False if the dataset draws random numbers; if it does not, set its attribute "
                "is_deterministic = True",
                stacklevel=2,
            )


def is_deterministic(dataset: Any) -> bool:
    """Whether an example of `dataset` is known to depend on its index alone."""
    stated = getattr(dataset, "is_deterministic", None)
    if stated is not None:
        return bool(stated)
    if type(dataset) is Subset:
        return is_deterministic(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(is_deterministic(part) for part in dataset.datasets)
    if type(dataset) is StackDataset:
        parts: Any = dataset.datasets
        return all(is_deterministic(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return type(dataset) is TensorDataset


def _may_skip(batches: Any) -> bool:
    return (
        type(batches) is DataLoader
        and isinstance(batches.dataset, Dataset)
        and not isinstance(batches.dataset, IterableDataset)
        and not batches.persistent_workers
        and is_deterministic(batches.dataset)
    )


def _without_first(loader: Any, count: int) -> Iterator[Any]:
    """An iterator over `loader` that begins `count` batches later: nothing is loaded for those before."""
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    later = _Later(getattr(loader, attribute), count)
    clone = copy.copy(loader)
    vars(clone)[attribute] = later  # a DataLoader forbids the assignment
    iterator: Iterator[Any] = iter(clone)
    later.skip()
    return iterator


class _Later:
    """The indices of a sampler without the first ones.

    The sampler is asked for its first index when a loader would have asked it, after the loader has drawn its seed.
    """

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count
        self._indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self._sampler)
        return self._rest()

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._count)

    def skip(self) -> None:
        """Draw and drop the first indices, if that was not done yet."""
        for _ in islice(self._indices, self._count):
            pass
        self._count = 0

    def _rest(self) -> Iterator[Any]:
        self.skip()
        yield from self._indices
