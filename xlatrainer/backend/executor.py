"""Turns a trace into an XLA program, compiles it once, runs it, and writes the results into the pending values.

The identity of a program is the tree node where its trace ended and which of the trace's values are still alive.
Buffers of leaves that nothing refers to any more (old parameters, old optimizer state) are donated: XLA writes results
into them.

May import: program, state, source, ir, runtime, host_memory, execution_time, counters, errors.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from xlatrainer.backend import counters, execution_time, measurements, runtime
from xlatrainer.backend.host_memory import give_back_freed_memory
from xlatrainer.backend.ir import Node, Trace, Value
from xlatrainer.backend.program import Program
from xlatrainer.backend.source import user_line
from xlatrainer.backend.state import Compilation, state
from xlatrainer.errors import ExecutionError, LostValueError

__all__ = ["Lost", "in_turn", "let_large_run_end", "raise_failed_checks", "run_pending", "start", "wait"]


_TO_FREE = 2e-4  # seconds in which XLA frees a run's temporaries, once its results are there


class Lost:
    """Stands for the buffer of a value whose program failed."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @classmethod
    def by(cls, error: BaseException) -> "Lost":
        """For what `error` kept from being computed."""
        return cls(f"{type(error).__name__}: {error}".partition("\n")[0])

    def error(self) -> LostValueError:
        return LostValueError(f"the value of this tensor was lost: {self.reason}")


def _find(trace: Trace, live: list[Value], dead: Sequence[bool], cause: str) -> Program:
    """The program for this trace, compiled if there is none; one that computes more than is alive will do."""
    outputs = tuple(value.slot for value in live)
    wanted = set(outputs)
    shardings = {value.slot: value.sharding for value in live if value.sharding is not None}
    precision = torch.get_float32_matmul_precision()
    programs = [program for program in trace.node.programs if program.matmul_precision == precision]
    for program in sorted(programs, key=lambda program: len(program.outputs)):
        if wanted.issubset(program.outputs) and program.lays_out(shardings):
            counters.add("CachedCompile")
            return program
    program = Program(trace, outputs, dead, shardings)
    measurements.record("InputOutputAliasCount", sum(program.donated), "")
    trace.node.programs.append(program)
    tell_compiled(trace.node, program, cause)
    return program


def tell_compiled(node: Node, program: Program, cause: str) -> None:
    """Note that a program was compiled at the user's line, and why; `node` is the last of what it is compiled from."""
    compilation = Compilation(node, program, cause, user_line())
    if state.reporter is not None:
        state.reporter.compiled(compilation)
    state.compilations.append(compilation)


def run_pending(cause: str) -> Program | None:
    """Compile (if new) and start what was recorded since the last call; does not wait for the results.

    `cause` says why now, for people.

    Returns the program that was started. With nothing pending, or nothing that anybody can still read, it does nothing
    and returns None.
    """
    if state.trace.num_nodes:
        let_large_run_end()
    with state.lock:
        raise_failed_checks()
        trace = state.trace
        if not trace.num_nodes:
            return None
        if state.observer is not None:
            state.observer.broken(f"what was recorded until then is run ({cause})", user_line())
        measurements.record("TraceTime", time.perf_counter() - trace.began)
        trace.views.clear()
        live = [value for value in (ref() for ref in trace.pending) if value is not None]
        random = (state.seed, state.random_offset)
        state.new_trace()
        try:
            return _run(trace, live, random, cause) if live else None
        finally:
            trace.leaves.clear()
            trace.pending.clear()
            trace.overwritten.clear()


def _run(trace: Trace, live: list[Value], random: tuple[int, int], cause: str) -> Program:
    try:
        for leaf in trace.leaves:
            if isinstance(leaf.buffer, Lost):
                raise leaf.buffer.error()
        dead = [leaf.value() is None for leaf in trace.leaves]
        program = _find(trace, live, dead, cause)
        buffers = [leaf.buffer for leaf in trace.leaves]
        for index, (given, is_dead) in enumerate(zip(program.donated, dead, strict=True)):
            if given and not is_dead:  # somebody keeps the old value this time: give a copy away
                buffers[index] = jax.numpy.copy(buffers[index])
        trace.leaves.clear()
        results = start(program, buffers, np.array(trace.floats, np.float64), np.array(trace.ints, np.int64), random)
    except BaseException as error:
        lost = Lost.by(error)
        for value in live:
            value.buffer = lost
        _undo(trace)
        raise
    by_slot = dict(zip(program.outputs, zip(results, program.shardings, strict=True), strict=True))
    for value in live:
        value.buffer, value.sharding = by_slot[value.slot]
    program.keep()
    if state.reporter is not None:
        state.reporter.executed(program, cause)
    return program


def tell_apart(program: Program) -> None:
    """Compile a program once more, since numbers have come that differ where they were equal when it was made."""
    program.tell_apart()
    cause = "numbers differ that were equal when the program was compiled (graph and memory are the same)"
    tell_compiled(program.nodes[-1], program, cause)


def start(program: Program, buffers: list[Any], floats: Any, ints: Any, random: tuple[int, int]) -> list[Any]:
    """Start a program; returns the arrays of its outputs, which may still be being computed.

    Args:
        program: what to start.
        buffers: of its leaves.
        floats, ints: the lifted numbers, NumPy arrays of float64 and int64 that nobody may change any more.
        random: the seed, and how many draws there were since it was set.

    Raises:
        ExecutionError: if it fails at once. Buffers that it was given are lost then.
    """
    if not program.takes(floats, ints):
        tell_apart(program)
    program.prepare()
    began = execution_time.starting()
    try:
        results = program.run(buffers, floats, ints, random)
        in_turn(program, results, results[program.smallest])
    except jax.errors.JaxRuntimeError as error:
        raise ExecutionError(f"the program failed: {error}\n{program.describe()}{program.dumped()}") from error
    counters.add("Execute")
    execution_time.started(began, results, program.smallest)
    if program.checks:
        code = results.pop()
        if program.home is not None:  # the first device's: it is done when what is read of that device is
            code = code.addressable_data(0)
        state.checks.append((program, code))
    return results


def in_turn(program: Program, results: Any, small: Any) -> None:
    """Wait for the results of a run where a program must end before the next one starts.

    Of a run that needs much memory the next one must await the end, with `let_large_run_end`; of its results, `small`
    is kept until then.
    """
    if program.home is not None and program.home.one_at_a_time:
        jax.block_until_ready(results)
    state.large_run = small if program.is_large else None
    state.large_run_is_first = program.runs == 1


def let_large_run_end() -> None:
    """Wait for the latest run if it needs so much memory that the next must not start beside it.

    XLA's CPU client allocates the temporaries of a run when that is asked for, not when it begins. Call it without the
    lock: other threads go on meanwhile.

    Raises:
        ExecutionError: If that run failed.
    """
    latest = state.large_run
    if latest is None:
        return
    try:
        if not latest.is_deleted():
            with execution_time.waiting():
                jax.block_until_ready(latest)
            # Nothing tells when they are freed, and the next run's would come beside them. This thread was woken on the
            # core of the one that frees them, which goes on once this one sleeps, not while it does something else.
            time.sleep(_TO_FREE)
            if state.large_run_is_first:
                # The next run asks for its small results first, and glibc may cut those out of the one large piece
                # that this run has freed: the temporaries would come to lie beside it.
                give_back_freed_memory()
    except jax.errors.JaxRuntimeError as error:
        raise ExecutionError(f"the program before this one failed: {error}") from error
    finally:
        state.large_run = None


def raise_failed_checks() -> None:
    """Raise the first error of programs that are done: an index out of range. Waits for nothing."""
    while state.checks and state.checks[0][1].is_ready():
        program, code = state.checks.pop(0)
        error = program.failure(code)
        if error is not None:
            raise error


def _undo(trace: Trace) -> None:
    """Give storages back what they held before a failed trace, unless it was donated to the program and is gone.

    A step that fails to compile leaves parameters and optimizer state as they were.
    """
    for storage, spec, buffer, sharding in reversed(trace.overwritten):
        data = storage()
        if data is not None and not (isinstance(buffer, Lost) or buffer.is_deleted()):
            data.value = value = Value(spec, buffer)
            value.sharding = sharding


def wait(values: Sequence[Value] = ()) -> None:
    """Block until the given values, or with none given all work that was started, is done."""
    buffers = [value.buffer for value in values]
    for buffer in buffers:
        if isinstance(buffer, Lost):
            raise buffer.error()
    with execution_time.waiting():
        if buffers:
            jax.block_until_ready(buffers)
        else:
            devices = [runtime.default_device()] if state.home is None else state.home.devices
            with runtime.x64():
                own = [device for device in devices if device.process_index == jax.process_index()]
                jax.block_until_ready([jax.device_put(np.zeros(()), device) + 0 for device in own])
    with state.lock:
        raise_failed_checks()
