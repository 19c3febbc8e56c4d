"""`Prefetched`: batches that threads draw and move ahead of whoever uses them, in order and with their errors.

Owns the threads between a loader and its consumer: one draws batches, others move them. Knows nothing of devices: what
moving a batch means is a function. A thread never refers to the consumer, so a consumer that is dropped ends them.
"""

import atexit
import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xlatrainer.data.position import ResumableBatches, set_epoch

__all__ = ["PrefetchIterator", "Prefetched", "checked_count"]

_SECONDS_TO_LOOK = 0.5  # at the latest, a thread that waits sees that its consumer is gone
_BY_ANOTHER = (
    "another one over the same loader has begun. Wrap the loader twice to go through it twice at a time: to validate "
    "in the midst of an epoch, say"
)
_SECONDS_TO_END = 1.0  # that `close` waits for the threads; a batch that is being loaded cannot be interrupted


@dataclass(frozen=True)
class _Item:
    """A place in the order of batches: a batch, the error in its place, or the end.

    Attributes:
        kind: "batch", "error" or "end".
        value: The batch or the error.
        position: Of a loader that keeps its position itself: the state after this batch.
    """

    kind: str
    value: Any = None
    position: Any = None


@dataclass
class _End:
    """Why there is nothing more to hand out; None as long as there is."""

    why: str | None = None

    def has_come(self) -> bool:
        return self.why is not None


class _Pipeline:
    """What the threads and the consumer share.

    Attributes:
        end: Told to all.
        drawn: Numbered items that wait to be moved.
        moved: Items that wait to be handed out, by number.
        handed_out: How many were.
    """

    def __init__(
        self,
        end: _End,
        draw: Callable[[], _Item],
        move: Callable[[Any], Any],
        finish: Callable[[], None],
        drawn_limit: int,
        moved_limit: int,
        movers: int,
    ) -> None:
        self.end = end
        self.condition = threading.Condition()
        self.drawn: deque[tuple[int, _Item]] = deque()
        self.moved: dict[int, _Item] = {}
        self.handed_out = 0
        self._is_last_taken = False
        self._draw, self._move, self._finish = draw, move, finish
        self._drawn_limit, self._moved_limit = drawn_limit, moved_limit
        work = {"xlatrainer loader": self._draw_all}
        work.update((f"xlatrainer transfer {number}", self._move_all) for number in range(movers))
        self.threads = [
            threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
            for name, function in work.items()
        ]

    def start(self) -> None:
        _open_pipelines.add(self)
        try:
            for thread in self.threads:
                thread.start()
        except RuntimeError:  # the system has no thread left
            self.close("its threads could not be started")
            raise

    def take(self) -> _Item:
        """The next item, waited for."""
        with self.condition:
            while self.handed_out not in self.moved:
                if self.end.has_come():
                    raise RuntimeError(f"there are no batches any more in this pass: {self.end.why}")
                if not self.condition.wait(_SECONDS_TO_LOOK) and not any(map(threading.Thread.is_alive, self.threads)):
                    raise RuntimeError("the threads that load batches have ended without a word")
            item = self.moved.pop(self.handed_out)
            self.handed_out += 1
            self.condition.notify_all()
        return item

    def abandon(self) -> None:
        """Let the threads end, without waiting for anything: from a finalizer, which may run in the midst of any code.

        A thread that waits sees it within `_SECONDS_TO_LOOK`.
        """
        self.end.why = self.end.why or "the pass was given up"
        if self.condition.acquire(blocking=False):
            self.condition.notify_all()
            self.condition.release()

    def close(self, why: str, seconds: float = _SECONDS_TO_END) -> None:
        """End the threads and wait for them, so long at most."""
        with self.condition:
            self.end.why = self.end.why or why
            self.moved.clear()
            self.condition.notify_all()
        until = time.monotonic() + seconds
        for thread in self.threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0.0))

    def join_reader(self) -> None:
        """Wait until nothing is drawn any more, so that the loader may be gone through again."""
        if self.threads[0].is_alive():
            self.threads[0].join()

    def _wait_until(self, is_true: Callable[[], bool]) -> bool:
        """Wait, with the condition held, for something or for the end; returns whether to go on."""
        while not self.end.has_come() and not is_true():
            self.condition.wait(_SECONDS_TO_LOOK)
        return not self.end.has_come()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            if self.end.has_come():  # nobody will want them
                with self.condition:
                    self.drawn.clear()
                    self.moved.clear()

    def _draw_all(self) -> None:
        number = 0
        try:
            while True:
                with self.condition:
                    if not self._wait_until(lambda: len(self.drawn) < self._drawn_limit):
                        return
                item = self._draw()
                is_last = item.kind != "batch"
                with self.condition:
                    self.drawn.append((number, item))
                    self.condition.notify_all()
                del item  # no batch is held beyond the limits, and no error by the frames of its own traceback
                if is_last:
                    return
                number += 1
        finally:
            self._finish()

    def _may_move(self) -> bool:
        return self._is_last_taken or (bool(self.drawn) and self.drawn[0][0] < self.handed_out + self._moved_limit)

    def _move_all(self) -> None:
        while True:
            with self.condition:
                if not self._wait_until(self._may_move) or self._is_last_taken:
                    return
                number, item = self.drawn.popleft()
                self._is_last_taken = item.kind != "batch"
                self.condition.notify_all()
            if item.kind == "batch":
                item = self._moved_or_error(item)
            with self.condition:
                self.moved[number] = item
                self.condition.notify_all()
            del item

    def _moved_or_error(self, item: _Item) -> _Item:
        try:
            return _Item("batch", self._move(item.value), item.position)
        except StopIteration as error:
            return _Item("error", RuntimeError(f"moving a batch raised {error!r}, which would look like the end"))
        except BaseException as error:  # noqa: BLE001 - raised where the batch was to be handed out
            return _Item("error", error)


_open_pipelines: "weakref.WeakSet[_Pipeline]" = weakref.WeakSet()

os.register_at_fork(after_in_child=_open_pipelines.clear)  # whose threads, and who holds their locks, are the parent's


@atexit.register
def _close_all() -> None:
    """At the interpreter's exit: threads that are in the midst of a batch must not meet an interpreter that is gone."""
    for pipeline in list(_open_pipelines):
        pipeline.close("the process ends")


class PrefetchIterator:
    """One pass over a `Prefetched`: an iterator; `close` ends it before its end, as does dropping it."""

    def __init__(self, pipeline: _Pipeline, position: "_Position") -> None:
        self._pipeline = pipeline
        self._position = position
        self._is_over = False
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, pipeline.abandon)
        self._finalizer.atexit = False  # `_close_all` does it, and waits
        pipeline.start()

    def __iter__(self) -> "PrefetchIterator":
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if os.getpid() != self._pid:
            raise RuntimeError(
                "these batches are loaded by threads of the parent process, which a forked child does not have: make "
                "and use the loader in the child, or send it the batches"
            )
        item = self._pipeline.take()
        if item.kind == "batch":
            self._position.drawn += 1
            self._position.own = item.position
            return item.value
        self._is_over = True
        self._pipeline.close("the pass is over")
        if item.kind == "error":
            try:
                raise item.value
            finally:
                del item  # which would keep the error's traceback, and with it this frame, alive
        self._position.ended = True
        raise StopIteration

    def close(self) -> None:
        """End the pass and its threads; waits for them for a second at most. Then there are no batches any more.

        What is being loaded cannot be interrupted: its thread ends after it.
        """
        self._pipeline.close("it was closed")


@dataclass
class _Position:
    """Where the consumer is: how many batches of the pass it has, the loader's own position then, and whether all."""

    drawn: int
    own: Any
    ended: bool = False


@dataclass
class _Pass:
    """The pass that goes on, or was the last one; None before the first."""

    position: _Position | None = None
    pipeline: _Pipeline | None = None


class Prefetched:
    """An iterable over the batches of `source`, moved, that threads prepare ahead.

    Batches come in the order of `source`, each once. An exception of `source` or of `move` is raised in its batch's
    place, with its own traceback, and ends the pass. There is one pass at a time: a new one ends the one before.

    `state_dict` is the position of the consumer, however far the threads are ahead. It goes on exactly after
    `load_state_dict`, as a `ResumableBatches` does.

    Args:
        source: A DataLoader or another iterable of batches. What of it runs in this process runs on a thread.
        move: What is done with each batch, on threads of its own, such as copying it to a device.
        drawn_limit: At most so many batches wait to be moved, at least 1.
        moved_limit: At most so many are moved, or wait to be handed out, at least 1.
        movers: How many batches are moved at the same time, at least 1. Default 1.

    Attributes:
        source: As given.
        reads_ahead: True; for those who save positions.

    Example:
        >>> batches = Prefetched([1, 2, 3], lambda batch: batch * 10, 2, 2)
        >>> list(batches), len(batches)
        ([10, 20, 30], 3)
    """

    reads_ahead = True

    def __init__(
        self,
        source: Iterable[Any],
        move: Callable[[Any], Any],
        drawn_limit: int,
        moved_limit: int,
        movers: int = 1,
    ) -> None:
        self.source = source
        self._move = move
        self._limits = (drawn_limit, moved_limit, movers)
        self._resumable = ResumableBatches(source, ahead=True)
        self._pass = _Pass()

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # raises for a source that does not know

    def __iter__(self) -> PrefetchIterator:
        self._end_pass()
        end = _End()
        batches = self._resumable.begun(end.has_come)
        position = self._pass.position = _Position(self._resumable.drawn, self._resumable.own_position())
        draw, finish = _drawing(batches, self._resumable)
        pipeline = self._pass.pipeline = _Pipeline(end, draw, self._move, finish, *self._limits)
        return PrefetchIterator(pipeline, position)

    def unmoved(self) -> "Prefetched":
        """The same, with the batches as `source` gives them: for those who move them themselves."""
        same = copy.copy(self)  # with the same pass and position
        same._move = _as_it_is
        return same

    def set_epoch(self, epoch: int) -> None:
        """Tell it to the source, its samplers and its dataset, where they have `set_epoch`."""
        set_epoch(self.source, epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was handed out last: plain data and CPU tensors."""
        position = self._pass.position
        if position is None or position.ended:
            return self._resumable.state_dict(between=True)
        return self._resumable.state_after(position.drawn, position.own)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where `state` says. Sets the host's random states."""
        self._end_pass()
        self._pass.position = None
        self._resumable.load_state_dict(state)

    def close(self) -> None:
        """End the pass that is going on, and its threads; waits for them for a second at most."""
        if self._pass.pipeline is not None:
            self._pass.pipeline.close("it was closed")

    def _end_pass(self) -> None:
        """A loader's workers and samplers serve one pass at a time: the one before must not draw any more."""
        if self._pass.pipeline is not None:
            self._pass.pipeline.close(_BY_ANOTHER)
            self._pass.pipeline.join_reader()
            self._pass.pipeline = None


def _as_it_is(batch: Any) -> Any:
    return batch


def _drawing(
    batches: Generator[Any, None, None], resumable: ResumableBatches
) -> tuple[Callable[[], _Item], Callable[[], None]]:
    """What the thread that draws calls for each item, and at the end."""
    iterator: Iterator[Any] = batches

    def draw() -> _Item:
        try:
            batch = next(iterator)
            return _Item("batch", batch, resumable.own_position())
        except StopIteration:
            return _Item("end")
        except BaseException as error:  # noqa: BLE001 - raised where the batch was to be handed out
            return _Item("error", error)

    return draw, batches.close


def checked_count(name: str, value: Any) -> int:
    """`value`, a number of batches or threads.

    Raises:
        TypeError: If it is no int.
        ValueError: If it is below 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value
