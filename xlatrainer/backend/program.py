"""A compiled program: the lowerings of a trace's nodes, called one after the other under `jax.jit`.

Owns what the program takes (leaves, lifted numbers, random state), what it gives (values, failed checks) and which
leaves are donated. Knows nothing of tensors. May import: ir, runtime, lowerings.checks, dtypes, config, errors.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xlatrainer import config
from xlatrainer.backend import runtime
from xlatrainer.backend.ir import Node, Trace
from xlatrainer.backend.lowerings.checks import Check, collecting, first_failure
from xlatrainer.errors import CompileError, LoweringError

__all__ = ["Program"]


class Program:
    """A compiled program of one trace.

    Attributes:
        outputs: slots of the values it computes, in order.
        donated: for each leaf, whether its buffer is given to the program.
        nodes: the recorded nodes, with the user's lines.
        checks: what may fail for its data, with the node that checks; if there is any, the last output says which did.
    """

    def __init__(self, trace: Trace, outputs: tuple[int, ...], dead: Sequence[bool]) -> None:
        self.outputs = outputs
        self.nodes = trace.node.path()
        self.floats = len(trace.floats)
        self.ints = len(trace.ints)
        self.random = trace.random_draws > 0
        self.checks: list[tuple[Check, Node]] = []
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

    def failure(self, code: Any) -> Exception | None:
        """The error that the last output of a run stands for, if any check failed."""
        first, value = np.asarray(code).tolist()
        if first < 0:
            return None
        check, node = self.checks[first]
        message = check.message.format(value=value)
        return check.kind(f"{message} ({node.operation.name}, recorded at {node.line})")

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
    checking = config.get("check_indices") == "on"
    program.checks.clear()
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
                with collecting() as checks:
                    results = operation.lower(operands, own_floats, own_ints, key)
            except Exception as error:
                raise LoweringError(
                    f"{operation.name} could not be lowered: {error}\n  recorded at {node.line}"
                ) from error
            env.update((first + i, result) for i, result in enumerate(results))
            if checking:
                program.checks += [(check, node) for check in checks]
        num_floats += operation.num_floats
        num_ints += operation.num_ints
        draws += operation.random
    outputs = [env[slot] for slot in program.outputs]
    return [*outputs, first_failure([check for check, _ in program.checks])] if program.checks else outputs
