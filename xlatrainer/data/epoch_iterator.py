"""`EpochIterator`: the numbered batches of one epoch after another.

Owns what an epoch is (a pass over the data, or a number of batches) and the rule for data that runs dry. How batches
are made of data belongs to `adapters`, their weights by class to `class_weight`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from xlatrainer.data.adapters import as_batches, is_endless, is_one_shot, kind_of, length_of
from xlatrainer.data.batch import plain_batch
from xlatrainer.data.position import ResumableBatches, set_epoch
from xlatrainer.data.process_share import PartOfBatch, share_of

__all__ = ["EpochIterator", "grouped"]

_END = object()


class EpochIterator:
    """Go through `data` epoch by epoch; draws exactly the batches it yields.

    An epoch is one pass over the data, or `steps` batches. In the latter case the next epoch goes on where the last
    one stopped; data that can be gone through again starts anew when it ends, but an epoch never has more than all of
    it: if `steps` are more, each epoch ends early, with one warning.

    An iterator (a generator, say), which cannot start anew, goes on where it stopped. When it ends in the midst of an
    epoch, the epoch ends early with a warning and is the last.

    Args:
        data: What `as_batches` makes, or takes without further arguments.
        argument: What the caller calls `data`, for the messages; default "data".
        epochs: How often it will be gone through; default 1.
        steps: Batches in an epoch; default None, as many as there are.
        steps_name: What the caller calls `steps`, for the messages; default "steps_per_epoch".
        limit: At most so many batches of each pass (an int, at least 1), or such a part of them (a float in (0, 1],
            rounded down, at least one). Default None, all.
        restarts: Whether every epoch starts anew, where `data` can. Default False.
        prepare: Called with each batch; default None, not.

    Raises:
        TypeError: If `data` does not yield batches.
        ValueError: If `epochs` is above 1 and `data` can be gone through only once, or if it never ends, and `steps` is
            None; for a limit out of range. Later, while iterating, if the first epoch yields no batch at all.

    Example:
        >>> batches = EpochIterator([("x0", "y0"), ("x1", "y1")])
        >>> list(batches)
        [(0, ('x0', 'y0')), (1, ('x1', 'y1'))]
        >>> batches.num_batches
        2
    """

    def __init__(
        self,
        data: Any,
        *,
        argument: str = "data",
        epochs: int = 1,
        steps: int | None = None,
        steps_name: str = "steps_per_epoch",
        limit: int | float | None = None,
        restarts: bool = False,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        self._batches = as_batches(data, argument=argument)
        self._argument = argument
        self._steps_name = steps_name
        self._one_shot = is_one_shot(self._batches)
        if steps is not None and steps < 1:
            raise ValueError(f"{steps_name} must be at least 1, got {steps}")
        self._limit = None if limit is None else _number_of(limit, length_of(self._batches), argument)
        self._steps = steps
        self._epochs = epochs
        self._restarts = (restarts or (steps is None)) and not self._one_shot
        self._prepare = prepare
        self._check_ends(data)
        self._position = ResumableBatches(self._batches)
        self._iterator: Iterator[Any] | None = None
        self._ahead: list[Any] = []  # drawn, not handed out yet
        self._drawn = 0  # of the pass
        self._handed_out = 0  # of the epoch
        self._first = 0  # the index at which an epoch goes on
        self._goes_on = False
        self._has_warned = False

    def _check_ends(self, data: Any) -> None:
        kind = kind_of(data)
        if self._steps is None and self._limit is None and is_endless(self._batches):
            raise ValueError(f"{self._argument} ({kind}) never ends: say how many batches, {self._steps_name}=...")
        if self._epochs > 1 and self._one_shot and self._steps is None:
            raise ValueError(
                f"{self._argument} is a {kind}, which can be gone through once, but {self._epochs} epochs were asked "
                f"for. Pass {self._steps_name}=..., or a list, a DataLoader, or an object whose __iter__ starts anew"
            )

    @property
    def num_batches(self) -> int | None:
        """How many batches an epoch has, or None where `data` does not say."""
        numbers = (self._steps, self._limit, length_of(self._batches))
        return min((number for number in numbers if number is not None), default=None)

    @property
    def is_one_shot(self) -> bool:
        """Whether it is gone through once: an iterator, which cannot start anew."""
        return self._one_shot

    def share(self, index: int, count: int, parts: int) -> None:
        """Let process `index` of `count` draw its own parts of the batches where that can be: see `share_of`."""
        if count > 1:
            self._batches = share_of(self._batches, index, count, parts)
            self._position = ResumableBatches(self._batches)

    def begin_epoch(self, epoch: int) -> bool:
        """Say that epoch number `epoch` begins; returns whether there are batches for it.

        The loader, its samplers and its dataset are told the number, where they have `set_epoch`. From an iterator that
        has given batches before, the first batch is drawn; where there is none, a warning says so.
        """
        set_epoch(self._batches, epoch)
        if not self._one_shot or self._iterator is None or self._ahead:
            return True
        self._ahead = list(islice(self._iterator, 1))
        if not self._ahead:
            self._warn(f"{self._argument} ran out after {self._drawn} batches: there is no epoch {epoch + 1}")
        return bool(self._ahead)

    def close(self) -> None:
        """Let go of a pass that is not finished, and of the worker processes of its loader."""
        self._iterator = None

    def state_dict(self, done: int | None) -> dict[str, Any]:
        """Where in the data a training is, with the random states that its order depends on: see `ResumableBatches`.

        Args:
            done: How many batches of the epoch that is going on are done; None between two epochs.
        """
        position = self._position.state_dict(between=done is None and self._restarts)
        unused = len(self._ahead) + (0 if done is None else self._handed_out - done)
        position["drawn"] -= unused
        position["ended"] = position["ended"] and not unused
        return {"done": done or 0, "iterator": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` says at the next iteration; sets the random states."""
        self._first = self._handed_out = state["done"]
        self._position.load_state_dict(state["iterator"])
        self._iterator, self._drawn = iter(self._position), state["iterator"]["drawn"]
        self._goes_on = True

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """The batches of one epoch with their indices, from 0; the first time after `load_state_dict` those left."""
        wanted = min((n for n in (self._steps, self._limit) if n is not None), default=None)
        if self._iterator is None or (self._restarts and not self._goes_on):
            self._start_pass()
        self._goes_on = False
        index, self._first = self._first, 0
        self._handed_out = index
        may_start_anew = wanted is not None and not self._one_shot and self._drawn > index
        while wanted is None or index < wanted:
            batch = self._next()
            if batch is not _END:
                self._handed_out = index + 1
                yield index, batch
                index += 1
            elif may_start_anew:
                self._start_pass()
                may_start_anew = False
            else:
                break
        if index == 0:
            raise ValueError(f"{self._argument} ({kind_of(self._batches)}) yielded no batch. {self._why_empty()}")
        if wanted is not None and wanted == self._steps and index < wanted:
            self._ended_early(index, wanted)
        if self._restarts:
            self._iterator = None
            self._position.give_up()  # which may not have drawn a batch, if a checkpoint was saved after the last one

    def _start_pass(self) -> None:
        self._iterator, self._drawn = iter(self._position), 0

    def _next(self) -> Any:
        """The next batch of the pass, prepared, or `_END`."""
        assert self._iterator is not None
        drawn, self._ahead = self._ahead or list(islice(self._iterator, 1)), []
        if not drawn:
            return _END
        self._drawn += 1
        if isinstance(drawn[0], PartOfBatch):
            return replace(drawn[0], batch=self._prepared(drawn[0].batch))
        return self._prepared(drawn[0])

    def _prepared(self, drawn: Any) -> Any:
        batch = plain_batch(drawn)
        return batch if self._prepare is None else self._prepare(batch)

    def _ended_early(self, index: int, wanted: int) -> None:
        if self._one_shot:
            what = (
                f"ran out after {index} of the {wanted} batches that {self._steps_name} asks for: the epoch ends here"
            )
            self._warn(f"{self._argument} {what}, and is the last" if self._epochs > 1 else f"{self._argument} {what}")
        else:
            self._warn(
                f"{self._steps_name}={wanted}, but all of {self._argument} are {index} batches: an epoch ends after "
                f"these"
            )

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, UserWarning, stacklevel=2)

    def _why_empty(self) -> str:
        if self._one_shot:
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


def _number_of(limit: int | float, length: int | None, argument: str) -> int:
    """The number of batches that a limit stands for."""
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise TypeError(f"a limit of batches must be an int or a float, got {limit!r}")
    if isinstance(limit, int):
        if limit < 1:
            raise ValueError(f"a limit of batches must be at least 1, got {limit}")
        return limit
    if not 0.0 < limit <= 1.0:
        raise ValueError(f"a limit that is a float is a part of the batches, above 0.0 up to 1.0; got {limit}")
    if length is None:
        raise ValueError(f"{argument} does not say how many batches it has; give the limit as an int, not {limit}")
    return max(int(length * limit), 1)
