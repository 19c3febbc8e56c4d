"""Who may import whom inside `xlatrainer`, read from the source without importing it.

Upper layers import lower ones, never the other way round and never sideways unless the row says so. The other rules:
no cycle between modules, no own import inside a function, names come from the module that defines them, and private
parts of torch and jax are touched in one file.
"""

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "xlatrainer"
PRIVATE_API_FILE = "xlatrainer.backend._private_api"


@dataclass(frozen=True)
class Layer:
    """One row: `units` are modules or packages (with all below them), `sideways` lets its units import one another."""

    units: tuple[str, ...]
    sideways: bool = False


# From the top down. A unit takes in all modules below it, unless units below it have rows of their own: then it stands
# for its `__init__` alone, and a new module beside them needs a place here.
LAYERS = (
    Layer(("xlatrainer.__main__",)),
    Layer(("xlatrainer.cli.main",)),
    Layer(
        (
            "xlatrainer.cli",
            "xlatrainer.cli.bench",
            "xlatrainer.cli.consolidate",
            "xlatrainer.cli.debug_run",
            "xlatrainer.cli.dump_stacks",
            "xlatrainer.cli.info",
        ),
        sideways=True,
    ),
    Layer(("xlatrainer", "xlatrainer.torch_xla")),
    Layer(("xlatrainer.trainer", "xlatrainer.debug")),
    Layer(("xlatrainer.strategies", "xlatrainer.data", "xlatrainer.metrics", "xlatrainer.callbacks")),
    Layer(("xlatrainer.distributed", "xlatrainer.profiler")),
    # The device: what torch calls,
    Layer(("xlatrainer.backend",)),
    Layer(("xlatrainer.backend.kernels",)),
    # steps without their Python,
    Layer(("xlatrainer.backend.stablehlo",)),
    Layer(("xlatrainer.backend.capture", "xlatrainer.backend.dynamo", "xlatrainer.backend.exporting")),
    Layer(("xlatrainer.backend.replay.step",)),
    Layer(("xlatrainer.backend.replay.series",)),
    Layer(("xlatrainer.backend.replay.plan",)),
    Layer(("xlatrainer.backend.replay.observation",)),
    Layer(("xlatrainer.backend.replay.arguments",)),
    Layer(
        (
            "xlatrainer.backend.replay",
            "xlatrainer.backend.replay.optimizers",
            "xlatrainer.backend.replay.optimizer_state",
            "xlatrainer.backend.replay.snapshot",
            "xlatrainer.backend.replay.graphs",
            "xlatrainer.backend.replay.host_arguments",
        )
    ),
    Layer(("xlatrainer.backend.counted_kernels",)),
    Layer(("xlatrainer.backend.writing",)),
    Layer(
        (
            "xlatrainer.backend.storage_kernels",
            "xlatrainer.backend.detection_kernels",
            "xlatrainer.backend.fallback",
            "xlatrainer.backend.composites",
            "xlatrainer.backend.gradients",
            "xlatrainer.backend.inference_kernels",
            "xlatrainer.backend.autocast",
            "xlatrainer.backend.device",
            "xlatrainer.backend.modes",
            "xlatrainer.backend.device_module",
        )
    ),
    Layer(("xlatrainer.backend.closures", "xlatrainer.backend.memory", "xlatrainer.backend.recurrent")),
    Layer(("xlatrainer.backend.packed_sequences",)),
    Layer(
        (
            "xlatrainer.backend.recorder",
            "xlatrainer.backend.transfer",
            "xlatrainer.backend.random",
            "xlatrainer.backend.overlap",
        )
    ),
    # what a tensor is and how a trace runs, which do not know each other,
    Layer(("xlatrainer.backend.tensor", "xlatrainer.backend.executor", "xlatrainer.backend.cpu_errors")),
    Layer(("xlatrainer.backend.program",)),
    Layer(("xlatrainer.backend.program_cache", "xlatrainer.backend.precision")),
    Layer(
        (
            "xlatrainer.backend.state",
            "xlatrainer.backend.shapes",
            "xlatrainer.backend.argument_checks",
            "xlatrainer.backend.execution_time",
            "xlatrainer.backend.loaded",
        )
    ),
    Layer(("xlatrainer.backend.placement",)),
    Layer(("xlatrainer.backend.runtime", "xlatrainer.backend.differences")),
    # and plain functions and data; lowerings know nothing of nodes and traces.
    Layer(("xlatrainer.backend.strided",)),
    Layer(
        (
            "xlatrainer.backend.lowerings",
            "xlatrainer.backend.ir",
            "xlatrainer.backend.schema",
            "xlatrainer.backend.source",
            "xlatrainer.backend.counters",
            "xlatrainer.backend.measurements",
            "xlatrainer.backend.garbage",
            "xlatrainer.backend.host_memory",
            "xlatrainer.backend.equal_numbers",
            "xlatrainer.backend.processes",
        )
    ),
    Layer(("xlatrainer.backend.dtypes", "xlatrainer.backend._private_api")),
    # Files, on this machine and elsewhere.
    Layer(("xlatrainer.storage",)),
    Layer(
        ("xlatrainer.errors", "xlatrainer.config", "xlatrainer.optional", "xlatrainer.nested", "xlatrainer.encoding"),
        sideways=True,
    ),
)

TORCH_NAMESPACES_OF_OPERATORS = ("torch.ops",)  # `torch.ops.aten._softmax` is an operator's name, not a private part


@dataclass(frozen=True)
class Import:
    """One import statement's effect: `module` as the absolute name of one of our modules, and how it was written."""

    importer: str
    line: int
    module: str
    name: str | None  # the name taken out of `module`; None where the module itself is imported
    in_function: bool

    def __str__(self) -> str:
        what = f"{self.module}.{self.name}" if self.name else self.module
        return f"{_path_of(self.importer)}:{self.line}: {self.importer} imports {what}"


@cache
def _modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package stands for its `__init__`."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _path_of(module: str) -> Path:
    return _modules()[module].relative_to(ROOT)


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_modules()[module].read_text(encoding="utf-8"))


def _is_package(module: str) -> bool:
    return _modules()[module].name == "__init__.py"


def _runtime_imports(module: str) -> Iterator[Import]:
    """The imports of our own modules that happen when the code runs, so none under `if TYPE_CHECKING`."""
    pending: list[tuple[ast.AST, bool]] = [(_tree(module), False)]
    while pending:
        node, in_function = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend((child, in_function) for child in node.orelse)
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield Import(module, node.lineno, alias.name, None, in_function)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            if source.split(".")[0] == PACKAGE:
                for alias in node.names:
                    submodule = f"{source}.{alias.name}"
                    if submodule in _modules():
                        yield Import(module, node.lineno, submodule, None, in_function)
                    else:
                        yield Import(module, node.lineno, source, alias.name, in_function)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending.extend((child, inside) for child in ast.iter_child_nodes(node))


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """The dotted name of the module that `node` imports from, with the dots of a relative import resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + _is_package(module)]
    return ".".join([*parts, node.module] if node.module else parts)


@cache
def _imports() -> tuple[Import, ...]:
    return tuple(found for module in _modules() for found in _runtime_imports(module))


@cache
def _place(module: str) -> tuple[int, str] | None:
    """The number of the layer, counted from the bottom, and the unit that `module` belongs to."""
    units = {unit: height for height, layer in enumerate(reversed(LAYERS)) for unit in layer.units}
    for unit, height in units.items():
        whole = not any(other.startswith(f"{unit}.") for other in units)
        if module == unit or (whole and module.startswith(f"{unit}.")):
            return height, unit
    return None


def _is_allowed(importer: str, imported: str) -> bool:
    own, other = _place(importer), _place(imported)
    if own is None or other is None or own == other:
        return True  # what has no place is reported by a test of its own
    return other[0] < own[0] or (other[0] == own[0] and LAYERS[-1 - own[0]].sideways)


def _report(lines: list[str]) -> str:
    return "\n".join(["", *lines])


def test_every_module_has_a_layer() -> None:
    homeless = [f"{_path_of(module)}: add {module} to LAYERS" for module in _modules() if _place(module) is None]
    assert not homeless, _report(homeless)


def test_imports_point_downwards() -> None:
    wrong = [str(found) for found in _imports() if not _is_allowed(found.importer, found.module)]
    assert not wrong, _report(wrong)


def test_imports_of_unknown_modules_do_not_exist() -> None:
    wrong = [f"{found}, which is no module of ours" for found in _imports() if found.module not in _modules()]
    assert not wrong, _report(wrong)


def test_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for found in _imports():
        graph.setdefault(found.importer, set()).add(found.module)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_own_import_inside_a_function() -> None:
    hidden = [f"{found} inside a function; move it to the top" for found in _imports() if found.in_function]
    assert not hidden, _report(hidden)


def test_names_come_from_their_defining_module() -> None:
    wrong = [
        f"{found}; import it from the module that defines it"
        for found in _imports()
        if found.name and found.module in _modules() and _is_package(found.module)
    ]
    assert not wrong, _report(wrong)


def _private_uses(module: str) -> Iterator[str]:
    """`torch._C`, `torch.utils._pytree`, `from torch._C import ...`, `jax._src` wherever `module` names them."""
    for node in ast.walk(_tree(module)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            if _is_private(name):
                yield f"{_path_of(module)}:{node.lineno}: {name} belongs into {_path_of(PRIVATE_API_FILE)}"


def _is_private(name: str) -> bool:
    root, *parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return False  # an attribute of a call's result, say
    if root not in ("torch", "jax", "jaxlib") or name.startswith(TORCH_NAMESPACES_OF_OPERATORS):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def test_private_parts_are_touched_in_one_file() -> None:
    wrong = [use for module in _modules() if module != PRIVATE_API_FILE for use in _private_uses(module)]
    assert not wrong, _report(wrong)


def test_recipes_use_the_public_api() -> None:
    """A recipe is what a user copies: `import xlatrainer`, or names from the packages that are public there."""
    wrong = []
    for path in sorted((ROOT / "recipes").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                own = name.split(".")[0] == PACKAGE
                if own and (
                    name.startswith(f"{PACKAGE}.backend") or any(part.startswith("_") for part in name.split("."))
                ):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name} is not public")
    assert not wrong, _report(wrong)
