"""`ReplayedStep`: a function that is run as always until its steps repeat, and then without its Python.

May import: series, plan, observation, arguments, snapshot, optimizers, executor, precision, state, config,
counters, _private_api.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xlatrainer import config
from xlatrainer.backend import counters
from xlatrainer.backend._private_api import ambient_state
from xlatrainer.backend.executor import let_large_run_end, raise_failed_checks, run_pending
from xlatrainer.backend.precision import refresh_policy
from xlatrainer.backend.program import Program
from xlatrainer.backend.replay.arguments import flattened, kind_of
from xlatrainer.backend.replay.graphs import GraphLimit
from xlatrainer.backend.replay.observation import STEP_BEGINS, STEP_ENDS, Observation, observe, whole_graph
from xlatrainer.backend.replay.optimizers import Shadow
from xlatrainer.backend.replay.plan import Mismatch, Plan
from xlatrainer.backend.replay.series import Series
from xlatrainer.backend.replay.snapshot import Snapshot
from xlatrainer.backend.state import state

__all__ = ["ReplayedStep", "one_by_one"]

_log = logging.getLogger("xlatrainer.replay")

AUDIT_EVERY = 256  # replays after which a step runs its Python, to see whether it still does the same
PATIENCE = 4  # observations in a row without two that agree, after which the step is left alone for a while
FIRST_PAUSE = 64  # calls; each further pause is twice as long
MAX_PLANS = 32  # of different arguments


def one_by_one(
    step: Callable[..., Any], batches: Sequence[tuple[Any, ...]], before_each: Callable[[int], None] | None = None
) -> list[Any]:
    """Call `step` with each of these tuples of arguments, and `before_each` with the number of each before it."""
    results = []
    for index, args in enumerate(batches):
        if before_each is not None:
            before_each(index)
        results.append(step(*args))
    return results


class ReplayedStep:
    """Calls `function` as one program on the device, and without running its Python where that makes no difference.

    Each call is a step of its own: what is pending runs before it, what it recorded runs at its end. Two calls in a row
    that recorded the same, from the same places to the same places, make a plan; further calls with arguments of the
    same kind only start the program. Batches, learning rates and everything else that an optimizer computes from its
    hyperparameters, random numbers and all contents of tensors are inputs of the program. A change of anything else
    that the function can reach (a mode, a setting of a module, `requires_grad`, a tensor's shape) makes it run its
    Python again, as does, now and then, an audit.

    A function that changes Python state other than by giving a place another tensor, that draws numbers from Python's,
    NumPy's or torch's CPU generators, that reads a value of the device, or that is given other objects than tensors,
    numbers, strings and their like, is never replayed. What it reads on the host of a CPU tensor that it is given must
    be as it was. What it prints or sends away, on the other hand, cannot be seen.

    Args:
        function: makes a step.
        roots: what the function reaches; default None, the function itself with all that its closure, its globals and
            the object of a bound method hold.
        name: for messages.
        full_graph: raise a `GraphBreakError` for what would end the graph before the function.
        graphs_allowed: raise a `GraphLimitError` once the function has come to more different graphs; default None,
            any number.

    Attributes:
        reason: why the last call ran its Python; "" when it was replayed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        roots: dict[str, Any] | None = None,
        name: str = "",
        *,
        full_graph: bool = False,
        graphs_allowed: int | None = None,
    ) -> None:
        self.function = function
        self.full_graph = full_graph
        self.name = name or getattr(function, "__qualname__", type(function).__name__)
        self.reason = "it was not called yet"
        self._roots = {self.name: function} if roots is None else roots
        self._plans: dict[Any, Plan] = {}
        self._last: dict[Any, Observation] = {}
        self._snapshot: Snapshot | None = None
        self._shadows: dict[int, Shadow] = {}
        self._latest: Program | None = None
        self._replays = 0
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._paused = 0
        self._graphs = GraphLimit(self.name, graphs_allowed)

    def watched_roots(self) -> dict[str, Any]:
        """For a snapshot of something that calls this step: what it reaches, without what is known of its replay."""
        return self._roots

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._paused or config.get("replay") == "off" or state.observer is not None:
            return self._run(args, kwargs)
        leaves, tree = flattened((args, kwargs))
        key = _key(leaves, tree)
        plan = self._plans.get(key)
        if plan is not None and (self._replays + 1) % AUDIT_EVERY:
            given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            try:
                return self._replay(lambda: self._prepared(plan, given))
            except Mismatch as change:
                self._ended(str(change))
        elif plan is not None:
            self._replays += 1
        return self._observe(key, args, kwargs)

    def many(self, batches: Sequence[tuple[Any, ...]], before_each: Callable[[int], None] | None = None) -> list[Any]:
        """Call the function with each of these tuples of arguments; one program makes all the steps, once they repeat.

        The first time a number of steps comes, their program is compiled, beside that of the single step.

        Args:
            batches: the arguments of each step.
            before_each: called with the number of each step before it, perhaps more than once; default None. It may
                set the hyperparameters of optimizers and nothing else that the function reaches.
        """
        if len(batches) > 1 and not self._paused and config.get("replay") == "on":
            leaves = [flattened((args, {})) for args in batches]
            keys = [_key(each, tree) for each, tree in leaves]
            plan = self._plans.get(keys[0])
            due = self._replays // AUDIT_EVERY != (self._replays + len(batches)) // AUDIT_EVERY
            if plan is not None and not due and all(key == keys[0] for key in keys):
                given = [[leaf for leaf in each if isinstance(leaf, torch.Tensor)] for each, _ in leaves]
                try:
                    series = self._series_of(plan, len(batches))
                    return self._replay(lambda: lambda: series.run(given, self._shadows, before_each), len(given))
                except Mismatch as change:
                    self._ended(str(change))
        return one_by_one(self, batches, before_each)

    def memory(self) -> int | None:
        """The bytes that the program of the latest step whose Python ran needs; None before there was one."""
        return None if self._latest is None else self._latest.memory()

    @staticmethod
    def _series_of(plan: Plan, number: int) -> Series:
        if number not in plan.series:
            plan.series[number] = Series(plan, number)
        return plan.series[number]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's Python, unwatched."""
        self._paused = max(self._paused - 1, 0)
        run_pending(STEP_BEGINS)
        with state.lazy_region(), whole_graph() if self.full_graph else contextlib.nullcontext():
            result = self.function(*args, **kwargs)
        graph = state.trace.node
        run_pending(STEP_ENDS)
        self._graphs.note(graph)
        return result

    def _prepared(self, plan: Plan, given: list[torch.Tensor]) -> Callable[[], Any]:
        plan.check_read(given)
        found = plan.inputs(given)
        return lambda: plan.run(given, self._shadows, found)

    def _replay(self, prepare: Callable[[], Callable[[], Any]], steps: int = 1) -> Any:
        """Run what `prepare` returns; it is called, and the state looked at, while a large run is still going on."""
        if state.trace.num_nodes:
            run_pending(STEP_BEGINS)
        with state.lock:
            self._check_state()
            run = prepare()
        let_large_run_end()
        with state.lock:
            raise_failed_checks()
            if state.trace.num_nodes:  # by another thread meanwhile
                run_pending(STEP_BEGINS)
            result = run()
        self._replays += steps
        self.reason = ""
        counters.add("Replay", steps)
        return result

    def _check_state(self) -> None:
        """Raise `Mismatch` unless all that the function can reach is as it was."""
        assert self._snapshot is not None
        if not all(shadow.is_current() for shadow in self._shadows.values()):
            raise Mismatch("an optimizer was changed by somebody else")
        if self._snapshot.is_unchanged() or self._snapshot.adopt():
            return
        now = Snapshot(self._roots)
        change = next(iter([*now.opaque, *self._snapshot.changes(now)]), None)
        if change is not None:
            self._plans.clear()
            raise Mismatch(change)
        self._snapshot = now  # other objects that are equal, or other tensors in the same places
        for plan in self._plans.values():
            plan.follow(now)

    def _observe(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen = observe(self.function, args, kwargs, self._roots, full_graph=self.full_graph)
        if seen.node is not None:
            self._graphs.note(seen.node)
        result, seen.result = seen.result, None
        self._latest = seen.program
        earlier = self._last.get(key)
        difference: str | None = "it was not observed before"
        if earlier is not None:
            difference = seen.difference(earlier)
        if seen.reasons:
            difference = seen.reasons[0]
        snapshot, seen.snapshot = seen.snapshot, None  # it holds all tensors: only the latest one is kept
        if len(self._last) >= MAX_PLANS and key not in self._last:
            self._last.clear()
            self._plans.clear()
        self._last[key] = seen
        if snapshot is not None:
            self._snapshot = snapshot
            self._shadows = seen.shadows
        self._keep_plans(snapshot)
        if difference is None and snapshot is not None:
            self._plans[key] = Plan(seen, snapshot)
            self._failures, self._pause = 0, FIRST_PAUSE
        else:
            if self._plans.pop(key, None) is not None:
                self._ended(str(difference))
            elif earlier is not None or seen.reasons:
                self._failed(str(difference))
        self.reason = "" if difference is None else difference
        return result

    def _keep_plans(self, snapshot: Snapshot | None) -> None:
        """Let the plans for other arguments speak of the places as they are now."""
        for key, plan in list(self._plans.items()):
            try:
                if snapshot is None:
                    raise Mismatch("its state could not be followed")
                plan.follow(snapshot)
            except Mismatch:
                del self._plans[key]

    def _ended(self, reason: str) -> None:
        self.reason = reason
        counters.add("ReplayEnd")
        _log.info("%s runs its Python again: %s", self.name, reason)

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if self._failures >= PATIENCE:
            _log.info("%s is not replayed: %s", self.name, reason)
            counters.add("ReplayRefused")
            self._failures = 0
            self._paused = self._pause
            self._pause *= 2


def _key(leaves: list[Any], tree: Any) -> Any:
    """What decides which plan serves a call: the kind of its arguments, torch's modes, and the precision policy."""
    return tree, tuple(map(kind_of, leaves)), ambient_state(), refresh_policy()
