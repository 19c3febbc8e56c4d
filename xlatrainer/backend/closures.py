"""Step closures: functions that run when a step has been started, with its results.

Owns the queue of closures, the one worker thread of the asynchronous ones, and their errors. A closure's tensors are
noted when the step ends, as part of its program, and copied to the host together: by whoever runs the closures, or by
the worker, which then waits for the device in place of the training. The worker ends when it has had nothing to do for
a moment, so no thread outlives the work.

May import: transfer, executor, tensor, state, source, config, _private_api.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xlatrainer import config
from xlatrainer.backend._private_api import tree_flatten, tree_unflatten
from xlatrainer.backend.ir import Value
from xlatrainer.backend.source import user_line
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import value_of
from xlatrainer.backend.transfer import copies_of, values_to_host

__all__ = ["Closure", "add_step_closure", "finished", "run", "run_waiting", "step_ended", "take", "wait"]

_SECONDS_IDLE = 0.1  # until the worker thread ends; the next closure starts another


@dataclass
class Closure:
    """A function with its arguments; `take` replaces the `xla` tensors among `leaves` by their values."""

    function: Callable[..., Any]
    leaves: list[Any]
    tree: Any
    run_async: bool
    line: str

    def values(self) -> list[Value]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Value)]

    def call(self, copies: _Copies) -> BaseException | None:
        """Call the function; returns what it raised, with a note of where the closure was added."""
        try:
            leaves = [copies.of(leaf) if isinstance(leaf, Value) else leaf for leaf in self.leaves]
            self.function(*tree_unflatten(leaves, self.tree))
        except Exception as error:  # noqa: BLE001 - kept, and raised when the other closures have run
            name = getattr(self.function, "__qualname__", type(self.function).__name__)
            error.add_note(f"raised by the step closure {name}, which was added at {self.line}")
            return error
        return None


class _Copies:
    """Host copies of the values of several closures, all made at the first look at one."""

    def __init__(self, closures: Sequence[Closure], fetch: Callable[[list[Value]], list[torch.Tensor]]) -> None:
        self._values = {id(value): value for closure in closures for value in closure.values()}
        self._fetch = fetch
        self._copies: dict[int, torch.Tensor] = {}

    def of(self, value: Value) -> torch.Tensor:
        if not self._copies:
            self._copies = dict(zip(self._values, self._fetch(list(self._values.values())), strict=True))
            self._values.clear()
        return self._copies[id(value)]


class _Worker:
    """Runs closures one after the other on a thread of its own, which exists only while there are some."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._jobs: deque[tuple[Closure, _Copies]] = deque()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._errors: list[BaseException] = []

    def submit(self, closure: Closure, copies: _Copies) -> None:
        """Queue a closure; waits while there are too many, unless the worker itself asks."""
        limit = max(config.get("max_async_closures"), 1)
        with self._condition:
            if threading.current_thread() is not self._thread:
                self._condition.wait_for(lambda: len(self._jobs) < limit)
            self._jobs.append((closure, copies))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="xlatrainer step closures")
                self._thread.start()
            self._condition.notify_all()

    def wait(self) -> None:
        """Wait until every closure has run; at once on the worker's own thread."""
        with self._condition:
            if threading.current_thread() is not self._thread:
                self._condition.wait_for(lambda: not self._jobs and not self._is_busy)

    @property
    def has_failed(self) -> bool:
        return bool(self._errors)

    def take_errors(self) -> list[BaseException]:
        with self._condition:
            errors, self._errors = self._errors, []
        return errors

    def _work(self) -> None:
        while True:
            with self._condition:
                self._is_busy = False
                self._condition.notify_all()
                if not self._condition.wait_for(lambda: self._jobs, _SECONDS_IDLE):
                    self._thread = None
                    return
                closure, copies = self._jobs.popleft()
                self._is_busy = True
                self._condition.notify_all()
            error = closure.call(copies)
            del closure, copies
            if error is not None:
                with self._condition:
                    self._errors.append(error)


class _Queue:
    """The closures that wait for the end of the step, and the worker."""

    def __init__(self) -> None:
        self.forget()
        self._reports_at_exit = False

    def forget(self) -> None:
        """Be empty: in a forked child, whose parent runs the closures."""
        self.lock = threading.Lock()
        self.waiting: list[Closure] = []
        self.worker = _Worker()

    def add(self, closure: Closure) -> None:
        with self.lock:
            self.waiting.append(closure)
            if not self._reports_at_exit:
                self._reports_at_exit = True
                atexit.register(self._report)

    def take(self) -> list[Closure]:
        with self.lock:
            taken, self.waiting = self.waiting, []
        return taken

    def _report(self) -> None:
        """At the interpreter's exit, after the worker: show what nobody was told of."""
        for error in self.worker.take_errors():
            sys.excepthook(type(error), error, error.__traceback__)
        for closure in self.take():
            print(
                f"xlatrainer: the step closure added at {closure.line} did not run: no xla.sync() came after it",
                file=sys.stderr,
            )


_queue = _Queue()
os.register_at_fork(after_in_child=_queue.forget)


def add_step_closure(fn: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    """Call `fn(*args)` after the current step: what to print or log of it, without stopping the step.

    The next `xla.sync()`, step of a Trainer or call of an `xla.compile`d function runs all closures, in the order in
    which they were added, once the step's program has been started. All their tensors are fetched together.

    Args:
        fn: The function.
        args: Its arguments. `xla` tensors in them, also within tuples, lists and dicts, arrive as CPU tensors; all
            tensors arrive detached, with the values they have at the end of the step.
        run_async: True runs it on a thread, in order with the other asynchronous closures, so that the training does
            not wait for the step's results. `XLA_MAX_ASYNC_QUEUE` (100) closures may wait, then the step does. Default
            False.

    Raises:
        TypeError: If `fn` cannot be called, or `args` is no tuple or list.

    Added within a function that is replayed (a `training_step`, an `xla.compile`d function), it keeps that function's
    Python running in every step; a callback or the loop around it does not.

    An exception of a closure is raised by the `sync` that runs it, after the other closures of the queue; one of an
    asynchronous closure by the next `sync` after it, or at the end of `fit`, with its own traceback. If a step fails,
    its closures do not run.

    Example:
        >>> import torch, xlatrainer as xla
        >>> total = torch.arange(4, device="xla").sum()
        >>> xla.add_step_closure(lambda value: print("the sum is", value.item()), args=(total,))
        >>> xla.sync()
        the sum is 6
    """
    if not callable(fn):
        raise TypeError(f"add_step_closure takes a function, got {fn!r}")
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"args must be a tuple of the function's arguments, got {args!r}; one argument is args=(value,)"
        )
    line = user_line()
    if state.observer is not None:
        state.observer.interrupted("it adds a step closure", line)
    leaves, tree = tree_flatten(tuple(args))
    _queue.add(Closure(fn, leaves, tree, run_async, line))


def take() -> list[Closure]:
    """The closures that were added, for the end of a step; reading views becomes part of the pending program."""
    closures = _queue.take() if _queue.waiting else []
    for closure in closures:
        for index, leaf in enumerate(closure.leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.device.type == "xla":
                with state.lock:
                    closure.leaves[index] = value_of(leaf.detach())
            else:
                closure.leaves[index] = leaf.detach().clone() if closure.run_async else leaf.detach()
    return closures


def run(closures: Sequence[Closure]) -> None:
    """Run the closures of a step that has been started, then raise what failed in them or on the worker since.

    Raises:
        BaseException: The first error; others are noted on it.
    """
    if not closures and not _queue.worker.has_failed:
        return
    errors = _queue.worker.take_errors()
    here = _Copies([closure for closure in closures if not closure.run_async], values_to_host)
    there = _Copies([closure for closure in closures if closure.run_async], copies_of)
    for closure in closures:
        if closure.run_async:
            _queue.worker.submit(closure, there)
        elif (error := closure.call(here)) is not None:
            errors.append(error)
    if errors:
        _raise(errors)


def run_waiting() -> None:
    """Run what was added, if a step has just ended without `sync`."""
    run(take())


def step_ended() -> None:
    """Do what belongs to the end of a step that was made without `sync`: its closures, and its report."""
    run_waiting()
    if state.reporter is not None:
        state.reporter.stepped()


def wait() -> None:
    """Wait for the asynchronous closures, and raise what failed in them."""
    _queue.worker.wait()
    run(())


@contextlib.contextmanager
def finished() -> Iterator[None]:
    """A context at whose end all closures that were added in it are done and their errors raised.

    After an exception they are noted on it.
    """
    try:
        yield
    except BaseException as error:
        _queue.worker.wait()
        for other in _queue.worker.take_errors():
            error.add_note(_text_of(other))
        raise
    run_waiting()
    wait()


def _raise(errors: list[BaseException]) -> None:
    first, *others = errors
    for other in others:
        first.add_note(_text_of(other))
    raise first


def _text_of(error: BaseException) -> str:
    return "a further step closure failed:\n" + "".join(traceback.format_exception(error)).rstrip()
