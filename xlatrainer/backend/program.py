"""A compiled program: the lowerings of a trace's nodes, called one after the other under `jax.jit`.

Owns what the program takes (leaves, lifted numbers, random state), what it gives (values, failed checks) and which
leaves are donated. Knows nothing of tensors. May import: program_cache, equal_numbers, garbage, host_memory, placement,
ir, runtime, loaded, lowerings, dtypes, measurements, counters, config, errors.
"""

import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from xlatrainer import config
from xlatrainer.backend import counters, loaded, measurements, program_cache, runtime
from xlatrainer.backend.dtypes import to_numpy
from xlatrainer.backend.equal_numbers import EqualNumbers
from xlatrainer.backend.garbage import collector_paused
from xlatrainer.backend.host_memory import give_back_freed_memory
from xlatrainer.backend.ir import Node, Operation, Spec, Trace
from xlatrainer.backend.lowerings.checks import Check, collecting, first_failure
from xlatrainer.backend.lowerings.partitioning import lowering_on
from xlatrainer.backend.lowerings.platforms import lowered_for, lowering_as_elsewhere
from xlatrainer.backend.placement import Home, Sharding
from xlatrainer.errors import CompileError, LoweringError

__all__ = ["Graph", "Program", "compiled_function", "live_programs", "lower_program", "random_words"]


LARGE = 48 << 20  # bytes of temporaries from which on a run is waited for before the next one
LONG = 0.5  # seconds of a compilation after which its memory is given back
MAX_REPLICATED = 1024  # elements of an output that nobody has sharded, up to which each device has all of it


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
        home: the devices that it is for; None: the one device.
        equal: which of its numbers are read from one place; None: each from its own.
        checks: what may fail for its data, once it was lowered.
    """

    def __init__(self, end: Node, outputs: tuple[int, ...], home: Home | None = None) -> None:
        self.nodes = end.path()
        self.outputs = outputs
        self.home = home
        self.equal: EqualNumbers | None = None
        self.checks: list[Failing] = []
        self.floats = sum(node.operation.num_floats for node in self.nodes)
        self.ints = sum(node.operation.num_ints for node in self.nodes)
        self.random = any(node.operation.random for node in self.nodes)

    def lowered(self, donate: Sequence[int] = (), results: Sequence[Sharding | None] | None = None) -> Any:
        """The graph in JAX's form, `jax.stages.Lowered`, with the leaves at the positions `donate` given away.

        Its arguments are the leaves, then the lifted floats and ints and the random state where there are any. With a
        home, `results` says how the outputs shall lie, None where XLA may choose; the result of the checks, or None,
        then stands beside the list of the others.
        """
        with self.partitioning(results or ()) as mesh:
            return self._lowered_on(mesh, donate, results)

    @contextlib.contextmanager
    def partitioning(self, results: Sequence[Sharding | None] = ()) -> Iterator[Any]:
        """A block in which the graph may be lowered; gives the JAX mesh that it is lowered for, None without a home.

        `results`: how outputs shall lie.
        """
        if self.home is None:
            yield None
            return
        mesh = self._mesh(results)
        # JAX takes a partitioning of one's own for programs on one mesh only
        needs_help = len(self._meshes(results)) < 2 and self.home.devices[0].platform == "cpu"
        with lowering_on(mesh, needs_help):
            yield mesh

    def _mesh(self, results: Sequence[Sharding | None]) -> Any:
        """The JAX mesh that the graph is lowered for; None without a home."""
        return None if self.home is None else next(iter(self._meshes(results)), self.home.replicated.jax.mesh)

    def _meshes(self, results: Sequence[Sharding | None]) -> dict[Any, None]:
        """Those that shardings ask for, in their order."""
        asked = [node.operation.sharding for node in self.nodes] + list(results)
        return dict.fromkeys(each.jax.mesh for each in asked if each is not None and not each.is_replicated)

    def _lowered_on(self, mesh: Any, donate: Sequence[int], results: Sequence[Sharding | None] | None) -> Any:
        replicated = None if self.home is None else self.home.replicated.on(mesh)

        def argument(shape: tuple[int, ...], dtype: Any, sharding: Any = replicated) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        leaves = [node.operation for node in self.nodes if node.operation.lower is None]
        arguments = [
            argument(leaf.outputs[0].shape, to_numpy(leaf.outputs[0].held), leaf.sharding and leaf.sharding.on(mesh))
            for leaf in leaves
        ]
        arguments += [argument((self.floats,), np.float64)] if self.floats else []
        arguments += [argument((self.ints,), np.int64)] if self.ints else []
        arguments += [argument((4,), np.uint32)] if self.random else []

        def xla_trace(*inputs: Any) -> Any:
            leaves = list(inputs)
            random: Any = leaves.pop() if self.random else None
            ints: Any = leaves.pop() if self.ints else ()
            floats: Any = leaves.pop() if self.floats else ()
            outputs = lower_program(self, leaves, floats, ints, random)
            if results is None:
                return outputs
            return outputs[: len(results)], outputs[len(results)] if self.checks else None

        shardings = None if results is None else ([wanted and wanted.on(mesh) for wanted in results], replicated)
        return lowered_function(xla_trace, arguments, donate, shardings)

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
        specs: of each output; `shardings` how it lies on the devices of `home`, None on the one device.
        smallest: the position of the output of the fewest elements.
        matmul_precision: torch's setting for float32 products that it was compiled with.
        checks: what may fail for its data; if there is any, the last output says which did.
        from_disk: whether it came from the cache on disk, already compiled.
        is_large: whether its temporaries take so much memory that no two runs should have them at once.
        runs: how often it ran since its making, or since the counters were reset.
    """

    def __init__(
        self,
        trace: Trace,
        outputs: tuple[int, ...],
        dead: Sequence[bool],
        shardings: Mapping[int, Sharding] = MappingProxyType({}),
    ) -> None:
        """`shardings`: how outputs shall lie, by their slots."""
        super().__init__(trace.node, outputs, trace.home)
        self.runs = 0
        self.equal = EqualNumbers.among(trace.floats, trace.ints)
        by_slot = _specs(self.nodes)
        successors = _successors(trace, by_slot, outputs, dead)
        self.outputs = outputs = tuple(dict.fromkeys((*(s for s in successors if s is not None), *outputs)))
        self.specs = [by_slot[slot] for slot in outputs]
        self.smallest = min(range(len(outputs)), key=lambda i: self.specs[i].numel, default=0)
        self.donated = [slot is not None for slot in successors]
        self.shardings: list[Sharding | None] = [None] * len(outputs)
        if self.home is not None:
            self.shardings = self._wanted_shardings(successors, shardings)
            # what is not to lie as the leaf does cannot be written over it
            lies = dict(zip(outputs, self.shardings, strict=True))
            leaves = [node.operation.sharding for node in self.nodes if node.operation.lower is None]
            pairs = zip(successors, leaves, strict=True)
            self.donated = [slot is not None and lies[slot] is leaf for slot, leaf in pairs]
        self._wanted = self.shardings
        self.matmul_precision = torch.get_float32_matmul_precision()
        self._sizes: dict[str, int] = {}
        self._taken: tuple[Any, Any] = (None, None)  # the latest numbers that it was found to hold for
        self._loaded: Any = None
        self._to_keep: tuple[str, bytes] | None = None  # what `keep` puts on disk
        self.load()
        _programs.add(self)

    def load(self) -> None:
        """Get the machine code, from the cache on disk or from the compiler; says in `from_disk` which it was."""
        loaded.make_room()
        with collector_paused():
            seconds = self._load()
        on_cpu = runtime.default_device().platform == "cpu"  # elsewhere runs that follow each other share theirs
        self.is_large = on_cpu and self.memory_sizes().get("temporaries", 0) > LARGE
        if seconds > LONG:
            give_back_freed_memory()  # the compiler's, a few hundred MB for a large program

    def _load(self) -> float:
        """`load`; returns the seconds that were spent compiling."""
        start = time.perf_counter()
        numbers = (self.floats, self.ints, "" if self.equal is None else self.equal.text)
        key = program_cache.key_of(self.nodes, self.outputs, self.donated, numbers, self.home, self._wanted)
        kept = None if key is None else program_cache.load(key, self.specs, self.home, self._mesh(self._wanted))
        self.from_disk = kept is not None
        if kept is not None:
            self.checks = [Failing(*check) for check in kept.checks]
            self.shardings = kept.shardings
            self._loaded = kept.run
            return 0.0
        self._loaded = self._compile()
        counters.add("UncachedCompile")
        seconds = time.perf_counter() - start
        content = None if key is None else program_cache.written_out(self._loaded)
        self._to_keep = None if key is None or content is None else (key, content)
        measurements.record("CompileTime", seconds)
        return seconds

    def keep(self) -> None:
        """Put it on disk if it was compiled and is not there yet.

        Call it once the results of a run are in their places: XLA's threads compute meanwhile, and whatever goes wrong
        here loses nothing.
        """
        if self._to_keep is not None:
            kept, self._to_keep = self._to_keep, None
            program_cache.store(*kept, self.checks, () if self.home is None else self.shardings)

    def takes(self, floats: "np.ndarray[Any, Any]", ints: "np.ndarray[Any, Any]") -> bool:
        """Whether it holds for these numbers, float64 and int64, which nobody may change; see `tell_apart`."""
        if self.equal is None or (self._taken[0] is floats and self._taken[1] is ints):
            return True
        if not self.equal.hold(floats, ints):
            return False
        self._taken = floats, ints
        return True

    def tell_apart(self) -> None:
        """Be compiled once more, for numbers that may all differ."""
        self.equal = None
        self.load()

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
        donated = [i for i, given in enumerate(self.donated) if given]
        try:
            compiled = compiled_lowering(self.lowered(donated, None if self.home is None else self.shardings))
            if self.home is not None:
                found = zip(compiled.output_shardings[0], self.specs, strict=True)
                self.shardings = [self.home.sharding(sharding, len(spec.shape)) for sharding, spec in found]
            return compiled
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(
                f"XLA could not compile the program: {error}\n{self.describe()}{self.dumped()}"
            ) from error

    def lays_out(self, shardings: Mapping[int, Sharding]) -> bool:
        """Whether the outputs of these slots lie so."""
        return not shardings or all(
            shardings.get(slot) in (None, found) for slot, found in zip(self.outputs, self.shardings, strict=True)
        )

    def _wanted_shardings(self, successors: list[int | None], wanted: Mapping[int, Sharding]) -> list[Sharding | None]:
        """How each output shall lie: as its storage asks, or like the leaf whose place it takes.

        Others are whole on each device if they are small, so that whoever reads them needs no transfer between devices;
        of what is large XLA finds a sharding that costs it nothing.
        """
        assert self.home is not None
        leaves = [node.operation.sharding for node in self.nodes if node.operation.lower is None]
        asked: dict[int, Sharding | None] = {
            slot: leaf for slot, leaf in zip(successors, leaves, strict=True) if slot is not None
        }
        asked.update(wanted)
        return [
            asked.get(slot) or (self.home.replicated if spec.numel <= MAX_REPLICATED else None)
            for slot, spec in zip(self.outputs, self.specs, strict=True)
        ]

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
        """XLA's own estimates for the operators: "flops", "bytes accessed" and others. Compiles and runs nothing.

        On the CPU, too, for the forms that other platforms get: those of the CPU have loops, which XLA counts as one
        turn, and arithmetic of places.
        """
        with lowering_as_elsewhere():
            return dict(self.lowered().cost_analysis() or {})

    def memory(self) -> int:
        """The bytes that a run needs by XLA's account: inputs, outputs that are not written over inputs, temporaries.

        0 where XLA says nothing.
        """
        sizes = self.memory_sizes()
        return sum(sizes[name] for name in ("arguments", "outputs", "temporaries")) - sizes["donated"] if sizes else 0

    def run(
        self,
        leaves: list[Any],
        floats: "np.ndarray[Any, Any]",
        ints: "np.ndarray[Any, Any]",
        random: tuple[int, int],
    ) -> list[Any]:
        """Start the program, once prepared; returns its output arrays, which may still be being computed."""
        inputs = leaves
        if self.floats:
            inputs.append(floats)
        if self.ints:
            inputs.append(ints)
        if self.random:
            inputs.append(random_words(*random))
        self.runs += 1
        with runtime.x64():
            results = self._loaded(*inputs)
        if self.home is None or self.from_disk:
            return results
        outputs, failure = results
        return [*outputs, failure] if self.checks else outputs

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
    for storage, _, buffer, _ in trace.overwritten:
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


def _base_key(random: Any) -> Any:
    """The JAX key that the keys of all draws come from, of the seed in `random_words`.

    XLA's own generator takes five times as long as threefry on the CPU (18 ms for a million numbers).
    """
    if lowered_for() == "cpu":
        return jax.random.wrap_key_data(random[:2], impl="threefry2x32")
    return jax.random.wrap_key_data(jax.numpy.concatenate([random[:2], random[:2]]), impl="rbg")


def lowered_function(function: Any, arguments: Sequence[Any], donate: Sequence[int], shardings: Any = None) -> Any:
    """`function` of these arguments (arrays, or their shapes and dtypes), in JAX's form.

    `shardings`: of its results, in their structure; None where XLA may choose.
    """
    with runtime.x64(), jax.default_device(runtime.default_device()):
        jitted = jax.jit(function, donate_argnums=tuple(donate), keep_unused=True, out_shardings=shardings)
        return jitted.lower(*arguments)


def compiled_lowering(lowered: Any) -> Any:
    """What `lowered_function` gave, compiled for the device."""
    with runtime.x64(), jax.default_device(runtime.default_device()):
        return lowered.compile(compiler_options=runtime.compiler_options())


def compiled_function(function: Any, arguments: Sequence[Any], donate: Sequence[int], shardings: Any = None) -> Any:
    """`function` of these arguments (arrays, or their shapes and dtypes), compiled; see `lowered_function`."""
    return compiled_lowering(lowered_function(function, arguments, donate, shardings))


def _reader(numbers: Any, firsts: Any) -> Callable[[int], Any]:
    """Gives the number at a position, or the one that stands for it, as a scalar; each is read once."""

    @functools.cache
    def read(index: int) -> Any:
        return jax.lax.index_in_dim(numbers, index, keepdims=False)

    return read if firsts is None else lambda index: read(int(firsts[index]))


def _functions(nodes: list[Node], needed: set[int], on_several: bool) -> dict[Operation, Callable[..., Any]]:
    """What each operation of the nodes computes: of its operands, numbers and random key the results and its checks.

    Networks repeat themselves. What is in a program more than once is lowered once: JAX copies that from then on.
    """

    def with_checks(lower: Callable[..., Any], outputs: Sequence[Spec]) -> Callable[..., Any]:
        def function(*arguments: Any) -> tuple[list[Any], list[Check]]:
            with collecting(on_several) as found:
                results = lower(*arguments)
            return list(map(_held, results, outputs)), found

        return function

    functions = {}
    for operation, count in Counter(nodes[index].operation for index in needed).items():
        if operation.lower is not None:  # that of a leaf, which is given
            function = with_checks(operation.lower, operation.outputs)
            functions[operation] = function if count == 1 else jax.jit(function, inline=True)
    return functions


def lower_program(program: Graph, inputs: list[Any], floats: Any, ints: Any, random: Any) -> list[Any]:
    """The body of the program, node by node: its outputs, and the result of its checks if there are any.

    Runs under jax's tracing. `inputs` are the leaves, `floats`, `ints` and `random` the other inputs, as in `run`.
    """
    base_key = None if random is None else _base_key(random)
    needed = _needed(program)
    checking = config.get("check_indices") == "on"
    checks: list[Check] = []
    program.checks.clear()
    functions = _functions(program.nodes, needed, program.home is not None)
    env: dict[int, Any] = {}
    leaves = iter(inputs)
    float_at = _reader(floats, program.equal and program.equal.floats)
    int_at = _reader(ints, program.equal and program.equal.ints)
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
            own_floats = [float_at(i) for i in range(num_floats, num_floats + operation.num_floats)]
            own_ints = [int_at(i) for i in range(num_ints, num_ints + operation.num_ints)]
            operands = [env[slot] for slot in node.operands]
            try:
                with _scope(node):
                    results, found = functions[operation](operands, own_floats, own_ints, key)
            except Exception as error:
                raise LoweringError(
                    f"{operation.name} could not be lowered: {error}\n  recorded at {node.line}"
                ) from error
            env.update((first + i, result) for i, result in enumerate(results))
            if checking:
                checks += found
                program.checks += [Failing(check.kind, check.message, index) for check in found]
        num_floats += operation.num_floats
        num_ints += operation.num_ints
        draws += operation.random
    outputs = [env[slot] for slot in program.outputs]
    return [*outputs, first_failure(checks)] if checks else outputs
