"""`PT_XLA_DEBUG`: says at each compilation or execution why it happened, what changed, and how large the graph is.

The reporter is told of every program by the device. It looks at the settings each time, so a variable that is set late
counts; with none set it does nothing. Text goes to stderr or, with `PT_XLA_DEBUG_FILE`, to the end of that file.
"""

import atexit
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xlatrainer import config
from xlatrainer.backend import measurements
from xlatrainer.backend.differences import Difference, difference, nearest
from xlatrainer.backend.program import Program
from xlatrainer.backend.source import user_line
from xlatrainer.backend.state import Compilation, state
from xlatrainer.debug.dumps import append, save_graph
from xlatrainer.debug.metrics import executed_fallback_ops, metrics_report, time_text

__all__ = ["Recompile", "debug_level", "explain_recompiles", "findings", "install"]

ALL = 100  # the level of PT_XLA_DEBUG=1 alone
COMPILATIONS, EXECUTIONS = 1, 2  # the levels from which on these are analysed
RULE = "=" * 80
WARM_UP = 10  # steps that are not judged
TOO_OFTEN = 0.5  # of what should be rare, in each step
TOO_SLOW = {"CompileTime": 300.0, "ExecuteTime": 30.0}  # seconds


def debug_level() -> int:
    """0 for no analysis, 1 for compilations, 2 and more for executions too."""
    level = config.get("debug_level")
    if level >= 0:
        return int(level)
    return ALL if config.get("debug") == "1" else 0


@dataclass(frozen=True)
class Recompile:
    """A program that was compiled.

    Attributes:
        cause: why it ran: "sync", "a value is read", "a compiled function ends", ...
        line: the user's line that made it run.
        change: the first difference from the graph before it that is most like it; None for the first graph.
        operators, inputs, outputs: how many there are.
        bytes: of its memory, see `Program.memory_sizes`; empty where XLA does not say.
    """

    cause: str
    line: str
    change: Difference | None
    operators: int
    inputs: int
    outputs: int
    bytes: dict[str, int]

    def __str__(self) -> str:
        why = "the first graph" if self.change is None else f"changed since the most similar graph: {self.change}"
        return f"{self.operators} operators compiled, since {self.cause} at {self.line}; {why}"


def explain_recompiles(last: int | None = None) -> list[Recompile]:
    """Why programs were compiled, the latest last; those found in the cache on disk are among them.

    Args:
        last: how many of the latest; default None, all that are remembered (1,000).

    Example:
        >>> import torch, xlatrainer as xla
        >>> for rows in (2, 3):
        ...     total = torch.zeros(rows, 5).to("xla").erfc().sum()
        ...     xla.sync()
        >>> xla.debug.explain_recompiles(last=1)[0].change.text
        'input 0 of the graph is float32[3,5], was float32[2,5]: dimension 0 was 2, is 3, taken by aten::erfc'
    """
    compilations = list(state.compilations)
    first = 0 if last is None else max(len(compilations) - last, 0)
    return [_explained(each, compilations[:i]) for i, each in enumerate(compilations) if i >= first]


def _explained(compilation: Compilation, earlier: Iterable[Compilation]) -> Recompile:
    like = nearest(compilation.node, (each.node for each in earlier if each.node is not compilation.node))
    program: Program = compilation.program
    operators = [node for node in program.nodes if node.operation.lower is not None]
    return Recompile(
        compilation.cause,
        compilation.line,
        None if like is None else difference(like, compilation.node),
        len(operators),
        len(program.nodes) - len(operators),
        len(program.outputs),
        program.memory_sizes(),
    )


class _Reporter:
    """What the device tells of programs and steps; see `state.reporter`."""

    def __init__(self) -> None:
        self.steps = 0
        self._at_warm_up: dict[str, int] = {}
        self._has_begun = False

    def compiled(self, compilation: Compilation) -> None:
        if debug_level() < COMPILATIONS:
            return
        self._begin()
        found = _explained(compilation, state.compilations)
        _write("Compilation Analysis", _cause_lines("Compilation", found.cause, found.line, _counts(found)))
        if found.change is not None:
            _write("Compilation Analysis", ["Changed since the most similar graph:", f"  {found.change}"], closed=False)
        sizes = [f"{name}: {size / 1e9:.6f} GB ({size:,} bytes)" for name, size in found.bytes.items()] or [
            "XLA gives no sizes"
        ]
        _write("Post Compilation Analysis", sizes)

    def executed(self, program: Program, cause: str) -> None:
        if config.get("save_tensors_file"):
            save_graph(program)
        if debug_level() >= EXECUTIONS:
            self._begin()
            counts = {"inputs": sum(n.operation.lower is None for n in program.nodes), "outputs": len(program.outputs)}
            _write("Execution Analysis", _cause_lines("Execution", cause, user_line(), counts))

    def stepped(self) -> None:
        """A step has ended."""
        self.steps += 1
        if self.steps == WARM_UP:
            self._at_warm_up = _sample_counts()
        path = config.get("metrics_file")
        if path:
            append(path, f"[MetricsData; step={self.steps}]\n{metrics_report()}\n")

    def summary(self) -> list[str]:
        """What was found wrong in all steps after the first ones."""
        return list(findings(self.steps - WARM_UP, self._at_warm_up))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            _write("pt-xla-profiler", ["debugging is on (PT_XLA_DEBUG), which slows the program down"], closed=False)
            atexit.register(self._finish)

    def _finish(self) -> None:
        _write("pt-xla-profiler", self.summary(), closed=False)


def _sample_counts() -> dict[str, int]:
    measured = {name: measurements.of(name) for name in ("CompileTime", "TransferFromDeviceTime")}
    return {name: 0 if found is None else found.count for name, found in measured.items()}


def findings(steps: int, before: dict[str, int]) -> Iterator[str]:
    """What is too frequent in `steps` steps, too slow, or not lowered.

    Args:
        steps: how many there were since `before`.
        before: the numbers of samples of metrics when they began.
    """
    for name, count in _sample_counts().items():
        new = count - before.get(name, 0)
        if steps > 0 and new / steps > TOO_OFTEN:
            yield f"{name} too frequent: {new} counts during {steps} steps"
    for name, limit in TOO_SLOW.items():
        found = measurements.of(name)
        if found is not None and max(found.values) > limit:
            yield f"{name} too slow: longest instance took {time_text(max(found.values))}"
    if executed_fallback_ops():
        yield f"Op(s) not lowered: {', '.join(executed_fallback_ops())}"


def _counts(found: Recompile) -> dict[str, int]:
    return {"operators": found.operators, "inputs": found.inputs, "outputs": found.outputs}


def _cause_lines(what: str, cause: str, line: str, counts: dict[str, int]) -> list[str]:
    return [
        f"{what} Cause",
        f"  {cause}",
        "Graph Info:",
        *(f"  Number of Graph {name.title()}: {count}" for name, count in counts.items()),
        f"Python Frame Triggered {what}:",
        f"  {line}",
    ]


def _write(prefix: str, lines: list[str], *, closed: bool = True) -> None:
    shown = [RULE, *lines, RULE] if closed else lines
    text = "".join(f"{prefix}: {line}\n" for line in shown)
    path = config.get("debug_file")
    if path:
        append(path, text)
    else:
        sys.stderr.write(text)


def install() -> None:
    """Have the device tell the reporter."""
    state.reporter = _Reporter()
