"""A compiled program: the lowerings of a trace's nodes, called one after the other under `jax.jit`.

Owns what the program takes (leaves, lifted numbers, random state), what it gives (values, failed checks) and which
leaves are donated. Knows nothing of tensors. May import: program_cache, ir, runtime, loaded, lowerings.checks, dtypes,
measurements, counters, config, errors.
"""

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from xlatrainer import config
from xlatrainer.backend import counters, loaded, measurements, program_cache, runtime
from xlatrainer.backend.dtypes import to_numpy
from xlatrainer.backend.ir import Node, Spec, Trace
from xlatrainer.backend.lowerings.checks import Check, collecting, first_failure
from xlatrainer.errors import CompileError, LoweringError

__all__ = ["Graph", "Program", "compiled_function", "live_programs", "lower_program", "random_words"]


class Failing(NamedTuple):
    """What may fail for a program's data: the exception, its message, and the node that checks it."""

    kind: type[Exception]
    message: str
    node: int


class Graph:
    """Recorded nodes with what is wanted of them: what can be lowered.

    Attributes:
        nodes: the recorded nodes, with the user's lines.
        outputs: slots of the values that are wanted.
        checks: what may fail for its data, once it was lowered.
    """

    def __init__(self, end: Node, outputs: tuple[int, ...]) -> None:
        self.nodes = end.path()
        self.outputs = outputs
        self.checks: list[Failing] = []
        self.floats = sum(node.operation.num_floats for node in self.nodes)
        self.ints = sum(node.operation.num_ints for node in self.nodes)
        self.random = any(node.operation.random for node in self.nodes)

    def lowered(self, donate: Sequence[int] = ()) -> Any:
        """The graph in JAX's form, `jax.stages.Lowered`, with the leaves at the positions `donate` given away.

        Its arguments are the leaves, then the lifted floats and ints and the random state where there are any.
        """
        leaves = [node.operation.outputs[0] for node in self.nodes if node.operation.lower is None]
        arguments = [jax.ShapeDtypeStruct(leaf.shape, to_numpy(leaf.held)) for leaf in leaves]
        arguments += [jax.ShapeDtypeStruct((self.floats,), np.float64)] if self.floats else []
        arguments += [jax.ShapeDtypeStruct((self.ints,), np.int64)] if self.ints else []
        arguments += [jax.ShapeDtypeStruct((4,), np.uint32)] if self.random else []

        def xla_trace(*inputs: Any) -> list[Any]:
            leaves = list(inputs)
            random: Any = leaves.pop() if self.random else None
            ints: Any = leaves.pop() if self.ints else ()
            floats: Any = leaves.pop() if self.floats else ()
            return lower_program(self, leaves, floats, ints, random)

        return lowered_function(xla_trace, arguments, donate)

    def text(self) -> Iterator[str]:
        """The graph, a line for each node."""
        return self.nodes[-1].text() if self.nodes else iter(())

    def dumped(self) -> str:
        """For the error of a program that fails: its HLO, if it is asked for; also writes it to the file for it."""
        path, shown = config.get("save_hlo_file"), config.get("dump_hlo_graph") == "1"
        if not (path or shown):
            return ""
        text = self.lowered().as_text(dialect="hlo")
        if path:
            Path(path).write_text(text, encoding="utf-8")
        return f"\n{text}" if shown else f"\nits HLO is in {path}"

    def describe(self, last: int = 8) -> str:
        """The last operators with the user's lines."""
        lines = [f"  {node.operation.name} at {node.line}" for node in self.nodes if node.operation.lower is not None]
        more = len(lines) - last
        head = [f"  ... {more} before"] if more > 0 else []
        return "recorded operators, the last one last:\n" + "\n".join(head + lines[-last:])


class Program(Graph):
    """A compiled program of one trace.

    Attributes:
        outputs: slots of the values it computes; first those that replace a leaf, in the order of the leaves.
        donated: for each leaf, whether its buffer is given to the program.
        specs: of each output.
        smallest: the position of the output of the fewest elements.
        checks: what may fail for its data; if there is any, the last output says which did.
        from_disk: whether it came from the cache on disk, already compiled.
        runs: how often it ran since its making, or since the counters were reset.
    """

    def __init__(self, trace: Trace, outputs: tuple[int, ...], dead: Sequence[bool]) -> None:
        super().__init__(trace.node, outputs)
        self.runs = 0
        by_slot = _specs(self.nodes)
        successors = _successors(trace, by_slot, outputs, dead)
        self.outputs = outputs = tuple(dict.fromkeys((*(s for s in successors if s is not None), *outputs)))
        self.specs = [by_slot[slot] for slot in outputs]
        self.smallest = min(range(len(outputs)), key=lambda i: self.specs[i].numel, default=0)
        self.donated = [slot is not None for slot in successors]
        self._sizes: dict[str, int] = {}
        self._loaded: Any = None
        self.load()
        _programs.add(self)

    def load(self) -> None:
        """Get the machine code, from the cache on disk or from the compiler; says in `from_disk` which it was."""
        loaded.make_room()
        start = time.perf_counter()
        key = program_cache.key_of(self.nodes, self.outputs, self.donated, (self.floats, self.ints))
        kept = None if key is None else program_cache.load(key, self.specs)
        self.from_disk = kept is not None
        if kept is not None:
            self.checks = [Failing(*check) for check in kept.checks]
            self._loaded = kept.run
            return
        self._loaded = self._compile()
        if key is not None:
            program_cache.store(key, self._loaded, self.checks)
        counters.add("UncachedCompile")
        measurements.record("CompileTime", time.perf_counter() - start)

    def prepare(self) -> None:
        """Have the machine code there for a run."""
        if self._loaded is None:
            self.load()
        loaded.used(self)

    def release(self) -> None:
        """Give the machine code back until the next run."""
        self._sizes = self.memory_sizes()
        self._loaded = None

    def _compile(self) -> Any:
        try:
            return compiled_lowering(self.lowered([i for i, given in enumerate(self.donated) if given]))
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(
                f"XLA could not compile the program: {error}\n{self.describe()}{self.dumped()}"
            ) from error

    def memory_sizes(self) -> dict[str, int]:
        """Bytes of arguments, outputs, memory that both share (donated), temporaries and code, as XLA says it.

        Empty where it does not.
        """
        if self._loaded is None:
            return self._sizes
        analysis = getattr(self._loaded, "memory_analysis", lambda: None)()
        if analysis is None:
            return {}
        return {
            "arguments": int(analysis.argument_size_in_bytes),
            "outputs": int(analysis.output_size_in_bytes),
            "donated": int(analysis.alias_size_in_bytes),
            "temporaries": int(analysis.temp_size_in_bytes),
            "code": int(analysis.generated_code_size_in_bytes),
        }

    def cost(self) -> dict[str, float]:
        """XLA's own estimates for the program: "flops", "bytes accessed" and others. Compiles and runs nothing."""
        return dict(self.lowered().cost_analysis() or {})

    def memory(self) -> int:
        """The bytes that a run needs by XLA's account: inputs, outputs that are not written over inputs, temporaries.

        0 where XLA says nothing.
        """
        sizes = self.memory_sizes()
        return sum(sizes[name] for name in ("arguments", "outputs", "temporaries")) - sizes["donated"] if sizes else 0

    def run(self, leaves: list[Any], floats: list[float], ints: list[int], random: tuple[int, int]) -> list[Any]:
        """Start the program, once prepared; returns its output arrays, which may still be being computed."""
        inputs = leaves
        if self.floats:
            inputs.append(np.array(floats, np.float64))
        if self.ints:
            inputs.append(np.array(ints, np.int64))
        if self.random:
            inputs.append(random_words(*random))
        self.runs += 1
        with runtime.x64():
            return self._loaded(*inputs)

    def failure(self, code: Any) -> Exception | None:
        """The error that the last output of a run stands for, if any check failed."""
        first, value = np.asarray(code).tolist()
        if first < 0:
            return None
        failing = self.checks[first]
        node = self.nodes[failing.node]
        message = failing.message.format(value=value)
        return failing.kind(f"{message} ({node.operation.name}, recorded at {node.line})")


_programs: weakref.WeakSet[Program] = weakref.WeakSet()


def live_programs() -> Iterator[Program]:
    """The programs that there are, in no order."""
    return iter(list(_programs))


def _specs(nodes: list[Node]) -> dict[int, Spec]:
    """The spec of every slot."""
    specs: dict[int, Spec] = {}
    for node in nodes:
        first = node.num_slots - len(node.operation.outputs)
        specs.update((first + i, spec) for i, spec in enumerate(node.operation.outputs))
    return specs


def _successors(
    trace: Trace, specs: dict[int, Spec], outputs: tuple[int, ...], dead: Sequence[bool]
) -> list[int | None]:
    """For each leaf the output that is written over it, None if it is not donated.

    A dead leaf gets what its storage holds now, or else any output of its shape and dtype. JAX gives the n-th donated
    input of a shape and dtype to the n-th such output. A wrong choice (momentum written over a weight) makes XLA copy
    the input first, since it is read later.
    """
    now: dict[int, int] = {}
    for storage, _, buffer in trace.overwritten:
        data = storage()
        if data is not None and data.value is not None:
            now.setdefault(id(buffer), data.value.slot)
    leaves = [node.operation.outputs[0] for node in trace.node.path() if node.operation.lower is None]
    free = dict.fromkeys(outputs)
    successors: list[int | None] = [None] * len(leaves)
    for i, leaf in enumerate(trace.leaves):
        slot = now.get(id(leaf.buffer), -1) if dead[i] else -1
        if slot in free and specs[slot] == leaves[i]:
            successors[i] = slot
            del free[slot]
    for i, spec in enumerate(leaves):
        if dead[i] and successors[i] is None:
            slot = next((slot for slot in free if specs[slot] == spec), -1)
            if slot in free:
                successors[i] = slot
                del free[slot]
    return successors


def _held(array: Any, spec: Spec) -> Any:
    """`array` with the dtype that the device holds values of this spec in."""
    dtype = to_numpy(spec.held)
    return array if array.dtype == dtype else jax.lax.convert_element_type(array, dtype)


def _scope(node: Node) -> Any:
    """Where the operator comes from, in the names of what it is lowered to, if that is asked for."""
    if config.get("hlo_debug") != "1":
        return contextlib.nullcontext()
    where = f"{node.scope}/" if node.scope else ""
    return jax.named_scope(f"{where}{node.operation.name} at {node.line}")


def _needed(program: Graph) -> set[int]:
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


def random_words(seed: int, offset: int) -> np.ndarray[Any, Any]:
    """The random state as a program takes it: uint32[4], the low half of each number first."""
    return np.array([half for number in (seed, offset) for half in (number & 0xFFFFFFFF, number >> 32)], np.uint32)


def lowered_function(function: Any, arguments: Sequence[Any], donate: Sequence[int]) -> Any:
    """`function` of these arguments (arrays, or their shapes and dtypes), in JAX's form."""
    with runtime.x64(), jax.default_device(runtime.default_device()):
        return jax.jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*arguments)


def compiled_lowering(lowered: Any) -> Any:
    """What `lowered_function` gave, compiled for the device."""
    with runtime.x64(), jax.default_device(runtime.default_device()):
        return lowered.compile(compiler_options=runtime.compiler_options())


def compiled_function(function: Any, arguments: Sequence[Any], donate: Sequence[int]) -> Any:
    """`function` of these arguments (arrays, or their shapes and dtypes), compiled for the device."""
    return compiled_lowering(lowered_function(function, arguments, donate))


def lower_program(program: Graph, inputs: list[Any], floats: Any, ints: Any, random: Any) -> list[Any]:
    """The body of the program, node by node: its outputs, and the result of its checks if there are any.

    Runs under jax's tracing. `inputs` are the leaves, `floats`, `ints` and `random` the other inputs, as in `run`.
    """
    base_key = None
    if random is not None:
        base_key = jax.random.wrap_key_data(jax.numpy.concatenate([random[:2], random[:2]]), impl="rbg")
    needed = _needed(program)
    checking = config.get("check_indices") == "on"
    checks: list[Check] = []
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
                with collecting() as found, _scope(node):
                    results = operation.lower(operands, own_floats, own_ints, key)
            except Exception as error:
                raise LoweringError(
                    f"{operation.name} could not be lowered: {error}\n  recorded at {node.line}"
                ) from error
            held = map(_held, results, operation.outputs)
            env.update((first + i, result) for i, result in enumerate(held))
            if checking:
                checks += found
                program.checks += [Failing(check.kind, check.message, index) for check in found]
        num_floats += operation.num_floats
        num_ints += operation.num_ints
        draws += operation.random
    outputs = [env[slot] for slot in program.outputs]
    return [*outputs, first_failure(checks)] if checks else outputs
