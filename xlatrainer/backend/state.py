"""The one device of this process: its lock, the trace being recorded, the state of its random numbers.

Autograd runs backward passes on threads of its own, so the trace belongs to the device and not to a thread;
`state.lock` is held while an operator is recorded and while a trace is run.

May import: ir, placement, source, config, errors.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xlatrainer import config
from xlatrainer.backend.ir import Node, Operation, Trace, make_root
from xlatrainer.backend.placement import Home, move
from xlatrainer.backend.source import module_path, user_line, user_stack
from xlatrainer.errors import ForkedProcessError

__all__ = ["Compilation", "DeviceState", "state"]

# Nodes of the tree of traces after which it is planted anew (programs are then compiled again): a program whose graph
# never repeats must not fill the memory.
MAX_TREE_NODES = 1_000_000
DEFAULT_SEED = 0
MAX_COMPILATIONS = 1000  # that are remembered


class _ForkedLock:
    """Stands in for the lock in a forked child, where neither the lock nor the device can be used."""

    def __enter__(self) -> None:
        raise ForkedProcessError(
            "the xla device belongs to the parent process and cannot be used in a forked child (a DataLoader worker, "
            "multiprocessing): return CPU tensors from the child and move them in the parent, or start the child with "
            "the 'spawn' method"
        )

    def __exit__(self, *_: object) -> None:
        return None


class _EagerLock:
    """Stands in for the lock in eager mode: whoever lets go of it last runs what was recorded, which is one operator.

    Operators that a kernel calls for its work come together in one program.
    """

    def __init__(self, lock: Any, run: Callable[[], Any]) -> None:
        self._lock = lock
        self._run = run
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._depth += 1

    def __exit__(self, kind: Any, *rest: Any) -> None:
        try:
            if kind is None and self._depth == 1 and state.trace.num_nodes and not state.lazy_regions:
                self._run()
        finally:
            self._depth -= 1
            self._lock.__exit__(kind, *rest)


class Compilation(NamedTuple):
    """A program that was compiled: where its graph ends, the program, why it ran, and the line that made it run."""

    node: Node
    program: Any
    cause: str
    line: str


class DeviceState:
    """See the module's text. There is one instance, `state`."""

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        self.forked = False
        self.home: Home | None = None  # the devices that programs run on; None: the one device
        self.roots: dict[Home | None, Node] = {}  # of the tree of traces, for each home
        self.tree_nodes = 0
        self.trace = self.empty_trace()
        self.checks: list[tuple[Any, Any]] = []  # programs that were started, with the array that says what failed
        self.large_run: Any = None  # a result of the latest run, if that needs much memory; see `executor`
        self.large_run_is_first = False  # of its program
        self.seed = DEFAULT_SEED
        self.random_offset = 0  # draws since the seed was set, without those of the pending trace
        self.observer: Any = None  # told of what would keep a step from being replayed; see `replay.observation`
        self.reporter: Any = None  # told of every program that runs; see `debug.analysis`
        self.compilations: deque[Compilation] = deque(maxlen=MAX_COMPILATIONS)
        self.lazy_regions = 0  # blocks that are lazy in eager mode
        self.scopes: list[str] = []  # names of the blocks that operators are recorded in, the outermost first

    def extend(self, parent: Node, operation: Operation, token: tuple[Any, ...], num_slots: int) -> Node:
        """A new node of the tree, for a trace that leaves the known paths."""
        line = scope = ""
        if operation.lower is not None:
            line = user_stack() if config.get("ir_debug") == "1" else user_line()
            scope = "/".join([*self.scopes, *module_path()]) if config.get("hlo_debug") == "1" else ""
        node = Node(parent, operation, token[1:], num_slots, line, scope)
        parent.children[token] = node
        self.tree_nodes += 1
        return node

    def new_trace(self) -> Trace:
        """Start the next trace and return the one recorded until now."""
        done = self.trace
        self.random_offset += done.random_draws
        if self.tree_nodes > MAX_TREE_NODES:
            self.forget_programs()
        self.trace = self.empty_trace()
        return done

    def empty_trace(self) -> Trace:
        """A trace at the root of the tree."""
        if self.home not in self.roots:
            self.roots[self.home] = make_root()
        return Trace(self.roots[self.home], self.extend, self.home, move)

    def forget_programs(self) -> None:
        """Start an empty tree of traces: what is recorded from the next trace on is compiled anew."""
        self.roots.clear()
        self.tree_nodes = 0

    def set_home(self, home: Home | None) -> None:
        """Record for other devices from now on. Nothing may be pending: the trace runs where it was recorded for."""
        assert not self.trace.num_nodes
        self.home = home
        self.trace = self.empty_trace()

    def manual_seed(self, seed: int) -> None:
        """Start the random numbers anew. There must be no pending draws: the trace is run with one seed."""
        assert not self.trace.random_draws
        self.seed = seed
        self.random_offset = 0

    @property
    def is_eager(self) -> bool:
        return isinstance(self.lock, _EagerLock)

    def set_eager(self, run: Callable[[], Any] | None) -> None:
        """Run each operator at once, with `run`; None: no more."""
        with self.lock:
            if self.is_eager != (run is not None):
                self.lock = _EagerLock(self.lock, run) if run is not None else self.lock._lock

    @contextlib.contextmanager
    def lazy_region(self) -> Iterator[None]:
        """A block in which operators are recorded and not run at once, whatever the mode."""
        self.lazy_regions += 1
        try:
            yield
        finally:
            self.lazy_regions -= 1

    def mark_forked(self) -> None:
        """Called in a forked child."""
        self.forked = True
        self.lock = _ForkedLock()
        self.large_run = None  # the threads that would end it are the parent's


state = DeviceState()
os.register_at_fork(after_in_child=state.mark_forked)
