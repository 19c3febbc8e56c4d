"""The one device of this process: its lock, the trace being recorded, the state of its random numbers.

Autograd runs backward passes on threads of its own, so the trace belongs to the device and not to a thread;
`state.lock` is held while an operator is recorded and while a trace is run.

May import: ir, source, errors.
"""

import os
import threading
from typing import Any

from xlatrainer.backend.ir import Node, Operation, Trace, make_root
from xlatrainer.backend.source import user_line
from xlatrainer.errors import ForkedProcessError

__all__ = ["DeviceState", "state"]

# Nodes of the tree of traces after which it is planted anew (programs are then compiled again): a program whose graph
# never repeats must not fill the memory.
MAX_TREE_NODES = 1_000_000
DEFAULT_SEED = 0


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


class DeviceState:
    """See the module's text. There is one instance, `state`."""

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        self.forked = False
        self.root = make_root()
        self.tree_nodes = 0
        self.trace = Trace(self.root, self.extend)
        self.checks: list[tuple[Any, Any]] = []  # programs that were started, with the array that says what failed
        self.seed = DEFAULT_SEED
        self.random_offset = 0  # draws since the seed was set, without those of the pending trace
        self.observer: Any = None  # told of what would keep a step from being replayed; see `replay.observation`

    def extend(self, parent: Node, operation: Operation, token: tuple[Any, ...], num_slots: int) -> Node:
        """A new node of the tree, for a trace that leaves the known paths."""
        node = Node(parent, operation, token[1:], num_slots, user_line() if operation.lower is not None else "")
        parent.children[token] = node
        self.tree_nodes += 1
        return node

    def new_trace(self) -> Trace:
        """Start the next trace and return the one recorded until now."""
        done = self.trace
        self.random_offset += done.random_draws
        if self.tree_nodes > MAX_TREE_NODES:
            self.forget_programs()
        self.trace = Trace(self.root, self.extend)
        return done

    def forget_programs(self) -> None:
        """Start an empty tree of traces: what is recorded from the next trace on is compiled anew."""
        self.root = make_root()
        self.tree_nodes = 0

    def manual_seed(self, seed: int) -> None:
        """Start the random numbers anew. There must be no pending draws: the trace is run with one seed."""
        assert not self.trace.random_draws
        self.seed = seed
        self.random_offset = 0

    def mark_forked(self) -> None:
        """Called in a forked child."""
        self.forked = True
        self.lock = _ForkedLock()


state = DeviceState()
os.register_at_fork(after_in_child=state.mark_forked)
