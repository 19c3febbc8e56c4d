"""`EpochIterator`: the numbered batches of one epoch after another.

Owns `data` (what is gone through), the place reached in it, and the rule for data that runs dry. The arguments of `fit`
belong elsewhere: `epochs` and `validation_data` to the Trainer, the batch size and the order to `data` itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from xlatrainer.data.adapters import as_batches, is_one_shot
from xlatrainer.data.position import ResumableBatches, set_epoch

__all__ = ["EpochIterator", "grouped"]


class EpochIterator:
    """Go through `data` once an epoch; draws exactly the batches it yields.

    Args:
        data: A DataLoader, a list of batches, or any other iterable of batches.
        argument: What the caller calls `data`, for the messages; default "data".
        epochs: How often it will be gone through; default 1.

    Raises:
        TypeError: If `data` does not yield batches.
        ValueError: If `epochs` is above 1 and `data` can be gone through only once. Later, while iterating, if an
            epoch yields no batch at all.

    Example:
        >>> batches = EpochIterator([("x0", "y0"), ("x1", "y1")])
        >>> list(batches)
        [(0, ('x0', 'y0')), (1, ('x1', 'y1'))]
        >>> batches.num_batches
        2
    """

    def __init__(self, data: Any, *, argument: str = "data", epochs: int = 1) -> None:
        self._batches = as_batches(data, argument=argument)
        self._position = ResumableBatches(self._batches)
        self._first = 0
        self._argument = argument
        if epochs > 1 and is_one_shot(self._batches):
            raise ValueError(
                f"{argument} is a {type(data).__name__}, which can be gone through once, but {epochs} epochs were "
                f"asked for. Pass a list, a DataLoader, or an object whose __iter__ starts anew"
            )

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has, or None where `data` does not say."""
        return _length(self._batches)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """The batches of one epoch with their indices, from 0; the first time after `load_state_dict` those left."""
        first, self._first = self._first, 0
        index = first - 1
        for index, batch in enumerate(self._position, first):
            yield index, batch
        if index < 0:
            raise ValueError(f"{self._argument} ({type(self._batches).__name__}) yielded no batch. {self._why_empty()}")

    def begin_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers and its dataset the number of the epoch, where they have `set_epoch`."""
        set_epoch(self._batches, epoch)

    def state_dict(self, done: int | None) -> dict[str, Any]:
        """Where in the data a training is, with the random states that its order depends on: see `ResumableBatches`.

        Args:
            done: How many batches of the epoch that is going on are done; None between two epochs.
        """
        return {"done": done or 0, "iterator": self._position.state_dict(between=done is None)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` says at the next iteration; sets the random states."""
        self._first = state["done"]
        self._position.load_state_dict(state["iterator"])

    def _why_empty(self) -> str:
        if is_one_shot(self._batches):
            return "It can be gone through once, and was used up before; make a new one"
        return "Is its dataset empty, or shorter than one batch with drop_last=True?"


def grouped(numbered: Iterable[tuple[int, Any]], size: int) -> Iterator[list[tuple[int, Any]]]:
    """Up to `size` of the numbered batches at a time.

    Example:
        >>> list(grouped(enumerate("abc"), 2))
        [[(0, 'a'), (1, 'b')], [(2, 'c')]]
    """
    group = []
    for each in numbered:
        group.append(each)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _length(batches: Iterable[Any]) -> int | None:
    # The length of a loader over an IterableDataset is a guess: it knows neither the workers' shares nor the dataset.
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
        return None
    if isinstance(batches, Sized):
        return len(batches)
    return None
