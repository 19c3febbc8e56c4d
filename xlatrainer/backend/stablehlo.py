"""Functions and `torch.export`ed programs as StableHLO: as text, in a file, and back as something to call.

May import: exporting, executor, tensor, runtime, ir, dtypes, _private_api.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jax import export as jax_export

from xlatrainer.backend import runtime
from xlatrainer.backend._private_api import tree_flatten, tree_map, tree_unflatten
from xlatrainer.backend.dtypes import from_numpy
from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.exporting import exported_program
from xlatrainer.backend.ir import Value, make_spec
from xlatrainer.backend.tensor import new_tensor, value_of
from xlatrainer.optional import require

__all__ = ["exported", "load_stablehlo", "save_stablehlo", "stablehlo"]


def stablehlo(fn_or_exported: Any, *args: Any) -> str:
    """The StableHLO text of a function, a module or a `torch.export.ExportedProgram`, for arguments like these.

    What it reads besides its arguments (weights) becomes constants. It is called once.

    Args:
        fn_or_exported: Takes and returns tensors, in nested structures if need be.
        *args: Tensors of any device, of the shapes and dtypes that the program is for.

    Raises:
        TypeError: If it cannot be called.
        ValueError: If it is no single program: it draws random numbers, reads values, or runs an operator on the CPU.

    Example:
        >>> import torch, xlatrainer as xla
        >>> "stablehlo.exponential" in xla.stablehlo(torch.exp, torch.ones(2))
        True
    """
    return str(exported(fn_or_exported, args).mlir_module())


def save_stablehlo(fn_or_exported: Any, args: tuple[Any, ...], path: str | os.PathLike[str]) -> None:
    """Write what `stablehlo` gives to a file, in the portable binary form of `jax.export`.

    Args:
        fn_or_exported: As for `stablehlo`.
        args: Its arguments, a tuple.
        path: The file; it appears whole or not at all.

    Raises:
        ImportError: If flatbuffers is not installed, with the command that installs it.
    """
    _require_flatbuffers()
    content = bytes(exported(fn_or_exported, args).serialize())
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load_stablehlo(path: str | os.PathLike[str]) -> Callable[..., Any]:
    """A function that runs what `save_stablehlo` wrote. Executes no Python of the file.

    Args:
        path: The file.

    Returns:
        A function of tensors, in the order of the original arguments' tensors, of their shapes and dtypes; tensors of
        another device are copied. It returns an `xla` tensor, or a tuple of them if there were several.

    Raises:
        ImportError: If flatbuffers is not installed, with the command that installs it.
    """
    _require_flatbuffers()
    program = jax_export.deserialize(bytearray(Path(path).read_bytes()))

    def run(*inputs: torch.Tensor) -> Any:
        wanted = program.in_avals
        if len(inputs) != len(wanted):
            raise TypeError(f"the program takes {len(wanted)} tensors, got {len(inputs)}")
        values = [value_of(tensor.detach().to("xla")) for tensor in inputs]
        pending = [value for value in values if value.buffer is None]
        if pending:
            run_pending("a loaded program runs")
        for number, (value, aval) in enumerate(zip(values, wanted, strict=True)):
            held = from_numpy(aval.dtype)
            spec = make_spec(tuple(aval.shape), held, held)
            if (value.spec.shape, value.spec.held) != (spec.shape, held):
                raise ValueError(f"argument {number} of the program must be {spec}, got {value.spec}")
        with runtime.x64():
            results = program.call(*(value.buffer for value in values))
        dtypes = [from_numpy(result.dtype) for result in results]
        specs = [make_spec(tuple(r.shape), dtype, dtype) for r, dtype in zip(results, dtypes, strict=True)]
        tensors = tuple(new_tensor(Value(spec, result)) for spec, result in zip(specs, results, strict=True))
        return tensors[0] if len(tensors) == 1 else tensors

    return run


def exported(fn_or_exported: Any, args: tuple[Any, ...]) -> jax_export.Exported:
    """What `stablehlo` gives as text, as an object of `jax.export`; the arguments are the same."""
    function = fn_or_exported
    if isinstance(function, torch.export.ExportedProgram):
        function = function.module().to("xla")
    if not callable(function):
        raise TypeError(f"stablehlo takes a function, a module or an exported program, got {function!r}")
    placed = tree_map(lambda leaf: leaf.detach().to("xla") if isinstance(leaf, torch.Tensor) else leaf, tuple(args))
    leaves, tree = tree_flatten(placed)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def flat(*inputs: torch.Tensor) -> list[torch.Tensor]:
        each = iter(inputs)
        given = [next(each) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        with torch.no_grad():
            result = function(*tree_unflatten(given, tree))
        return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]

    return exported_program(flat, tensors)


def _require_flatbuffers() -> None:
    require("flatbuffers", "a file of StableHLO", 'pip install "xlatrainer[stablehlo]"')
