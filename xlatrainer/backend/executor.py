"""Turns a trace into an XLA program, compiles it once, runs it, and writes the results into the pending values.

The identity of a program is the tree node where its trace ended and which of the trace's values are still alive.
Buffers of leaves that nothing refers to any more (old parameters, old optimizer state) are donated: XLA writes results
into them.

May import: state, ir, runtime, counters, errors.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xlatrainer.backend import counters, runtime
from xlatrainer.backend.ir import Node, Trace, Value
from xlatrainer.backend.state import state
from xlatrainer.errors import CompileError, ExecutionError, LostValueError, LoweringError

__all__ = ["Lost", "run_pending", "wait"]


class Lost:
    """Stands for the buffer of a value whose program failed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def error(self) -> LostValueError:
        return LostValueError(f"the value of this tensor was lost: {self.reason}")


class Program:
    """A compiled program of one trace.

    Attributes:
        outputs: slots of the values it computes, in order.
        donated: for each leaf, whether its buffer is given to the program.
        nodes: the recorded nodes, with the user's lines.
    """

    def __init__(self, trace: Trace, outputs: tuple[int, ...], dead: Sequence[bool]) -> None:
        self.outputs = outputs
        self.nodes = trace.node.path()
        self.floats = len(trace.floats)
        self.ints = len(trace.ints)
        self.random = trace.random_draws > 0
        self.donated = _donations(self.nodes, outputs, dead)
        self.compiled = self._compile([leaf.buffer for leaf in trace.leaves])

    def _compile(self, leaves: list[Any]) -> Any:
        arguments = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        arguments += [jax.ShapeDtypeStruct((self.floats,), np.float64)] if self.floats else []
        arguments += [jax.ShapeDtypeStruct((self.ints,), np.int64)] if self.ints else []
        arguments += [jax.ShapeDtypeStruct((4,), np.uint32)] if self.random else []
        donate = tuple(i for i, given in enumerate(self.donated) if given)

        def step(*inputs: Any) -> list[Any]:
            return _lower(self, list(inputs))

        step.__name__ = "xla_trace"
        with runtime.x64(), jax.default_device(runtime.default_device()):
            lowered = jax.jit(step, donate_argnums=donate, keep_unused=True).lower(*arguments)
            try:
                return lowered.compile(compiler_options=runtime.compiler_options())
            except jax.errors.JaxRuntimeError as error:
                raise CompileError(f"XLA could not compile the program: {error}\n{self.describe()}") from error

    def run(self, leaves: list[Any], floats: list[float], ints: list[int], random: tuple[int, int]) -> list[Any]:
        """Start the program; returns its output arrays, which may still be being computed."""
        inputs = leaves
        if self.floats:
            inputs.append(np.array(floats, np.float64))
        if self.ints:
            inputs.append(np.array(ints, np.int64))
        if self.random:
            words = [half for number in random for half in (number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF)]
            inputs.append(np.array(words, np.uint32))
        with runtime.x64():
            return self.compiled(*inputs)

    def describe(self, last: int = 8) -> str:
        """The last operators of the program with the user's lines."""
        lines = [f"  {node.operation.name} at {node.line}" for node in self.nodes if node.operation.lower is not None]
        more = len(lines) - last
        head = [f"  ... {more} before"] if more > 0 else []
        return "recorded operators, the last one last:\n" + "\n".join(head + lines[-last:])


def _donations(nodes: list[Node], outputs: tuple[int, ...], dead: Sequence[bool]) -> list[bool]:
    """Which leaves to donate: the dead ones, as far as there are outputs of the same shape and dtype to write there."""
    specs: dict[int, Any] = {}
    leaves = []
    for node in nodes:
        first = node.num_slots - len(node.operation.outputs)
        specs.update((first + i, spec) for i, spec in enumerate(node.operation.outputs))
        if node.operation.lower is None:
            leaves.append(node.operation.outputs[0])
    free = Counter(specs[slot] for slot in outputs)
    donated = []
    for spec, is_dead in zip(leaves, dead, strict=True):
        give = is_dead and free[spec] > 0
        free[spec] -= give
        donated.append(give)
    return donated


def _needed(program: Program) -> set[int]:
    """Indices of the nodes that the outputs depend on; the others are not lowered at all."""
    wanted = set(program.outputs)
    needed = set()
    for index in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[index]
        first = node.num_slots - len(node.operation.outputs)
        if any(slot in wanted for slot in range(first, node.num_slots)):
            needed.add(index)
            wanted.update(node.operands)
    return needed


def _lower(program: Program, inputs: list[Any]) -> list[Any]:
    """The body of the program: lowers node by node. Runs once, under jax's tracing."""
    random: Any = inputs.pop() if program.random else None
    ints: Any = inputs.pop() if program.ints else ()
    floats: Any = inputs.pop() if program.floats else ()
    base_key = None
    if random is not None:
        base_key = jax.random.wrap_key_data(jax.numpy.concatenate([random[:2], random[:2]]), impl="rbg")
    needed = _needed(program)
    env: dict[int, Any] = {}
    leaves = iter(inputs)
    num_floats = num_ints = draws = 0
    for index, node in enumerate(program.nodes):
        operation = node.operation
        first = node.num_slots - len(operation.outputs)
        if operation.lower is None:
            env[first] = next(leaves)
            continue
        if index in needed:
            key = None
            if operation.random and base_key is not None and random is not None:
                key = jax.random.fold_in(base_key, random[2] + np.uint32(draws))
            own_floats = floats[num_floats : num_floats + operation.num_floats]
            own_ints = ints[num_ints : num_ints + operation.num_ints]
            operands = [env[slot] for slot in node.operands]
            try:
                results = operation.lower(operands, own_floats, own_ints, key)
            except Exception as error:
                raise LoweringError(
                    f"{operation.name} could not be lowered: {error}\n  recorded at {node.line}"
                ) from error
            env.update((first + i, result) for i, result in enumerate(results))
        num_floats += operation.num_floats
        num_ints += operation.num_ints
        draws += operation.random
    return [env[slot] for slot in program.outputs]


def _find(trace: Trace, live: list[Value], dead: Sequence[bool]) -> Program:
    """The program for this trace, compiled if there is none; one that computes more than is alive will do."""
    outputs = tuple(value.slot for value in live)
    programs: list[Program] = trace.node.programs
    for program in programs:
        if program.outputs == outputs:
            counters.add("CachedCompile")
            return program
    wanted = set(outputs)
    for program in programs:
        if wanted.issubset(program.outputs):
            counters.add("CachedCompile")
            return program
    program = Program(trace, outputs, dead)
    counters.add("UncachedCompile")
    programs.append(program)
    return program


def run_pending() -> None:
    """Compile (if new) and start what was recorded since the last call; does not wait for the results.

    With nothing pending, or nothing that anybody can still read, it does nothing.
    """
    with state.lock:
        trace = state.trace
        if not trace.num_nodes:
            return
        trace.views.clear()
        live = [value for value in (ref() for ref in trace.pending) if value is not None]
        random = (state.seed, state.random_offset)
        state.new_trace()
        try:
            if live:
                _run(trace, live, random)
        finally:
            trace.leaves.clear()
            trace.pending.clear()
            trace.overwritten.clear()


def _run(trace: Trace, live: list[Value], random: tuple[int, int]) -> None:
    try:
        for leaf in trace.leaves:
            if isinstance(leaf.buffer, Lost):
                raise leaf.buffer.error()
        dead = [leaf.value() is None for leaf in trace.leaves]
        program = _find(trace, live, dead)
        buffers = [leaf.buffer for leaf in trace.leaves]
        for index, (given, is_dead) in enumerate(zip(program.donated, dead, strict=True)):
            if given and not is_dead:  # somebody keeps the old value this time: give a copy away
                buffers[index] = jax.numpy.copy(buffers[index])
        trace.leaves.clear()
        try:
            results = program.run(buffers, trace.floats, trace.ints, random)
        except jax.errors.JaxRuntimeError as error:
            raise ExecutionError(f"the program failed: {error}\n{program.describe()}") from error
    except BaseException as error:
        lost = Lost(f"{type(error).__name__}: {error}".partition("\n")[0])
        for value in live:
            value.buffer = lost
        _undo(trace)
        raise
    counters.add("Execute")
    by_slot = dict(zip(program.outputs, results, strict=True))
    for value in live:
        value.buffer = by_slot[value.slot]


def _undo(trace: Trace) -> None:
    """Give storages back what they held before a failed trace, unless it was donated to the program and is gone.

    A step that fails to compile leaves parameters and optimizer state as they were.
    """
    for storage, spec, buffer in reversed(trace.overwritten):
        data = storage()
        if data is not None and not (isinstance(buffer, Lost) or buffer.is_deleted()):
            data.value = Value(spec, buffer)


def wait(values: Sequence[Value] = ()) -> None:
    """Block until the given values, or with none given all work that was started, is done."""
    buffers = [value.buffer for value in values]
    for buffer in buffers:
        if isinstance(buffer, Lost):
            raise buffer.error()
    if buffers:
        jax.block_until_ready(buffers)
    else:
        with runtime.x64():
            jax.block_until_ready(jax.device_put(np.zeros(()), runtime.default_device()) + 0)
