"""A trained model as a file that runs without xlatrainer: for torch, for anything that runs StableHLO, or as ONNX.

Owns the formats. Nothing here changes the Trainer.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from xlatrainer.backend.stablehlo import exported
from xlatrainer.nested import map_tensors, tensors_in
from xlatrainer.optional import require
from xlatrainer.storage.publishing import publish_file
from xlatrainer.strategies.single import SingleDeviceStrategy
from xlatrainer.trainer.losses import predictions_of

__all__ = ["ExportFormat", "export_model"]

ExportFormat = Literal["torch", "stablehlo", "onnx"]


def export_model(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any,
    format: ExportFormat = "torch",
    dynamic_shapes: Any = None,
) -> None:
    """Write `model` to the file `path`; see `Trainer.export`."""
    arguments, keywords = _call_arguments(example_inputs)
    if format == "torch":
        write = _torch_program(model, arguments, keywords, dynamic_shapes)
    elif format == "onnx":
        write = _onnx_program(model, arguments, keywords, dynamic_shapes)
    elif format == "stablehlo":
        if dynamic_shapes is not None:
            raise ValueError(
                'dynamic_shapes is for "torch" and "onnx"; a StableHLO program has the shapes of its example'
            )
        write = _stablehlo_program(model, arguments, keywords, text=os.fspath(path).endswith(".mlir"))
    else:
        raise ValueError(f'format must be "torch", "stablehlo" or "onnx", got {format!r}')
    publish_file(path, write)


def _torch_program(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], dynamic_shapes: Any
) -> Callable[[Path], None]:
    program = torch.export.export(
        _on_cpu(model), _to_cpu(arguments), _to_cpu(keywords), dynamic_shapes=dynamic_shapes, strict=False
    )

    def write(path: Path) -> None:
        with path.open("wb") as file:
            torch.export.save(program, file)
            file.flush()
            os.fsync(file.fileno())

    return write


def _onnx_program(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], dynamic_shapes: Any
) -> Callable[[Path], None]:
    for package in ("onnx", "onnxscript"):
        require(package, 'export(format="onnx")', 'pip install "xlatrainer[onnx]"')
    program = torch.onnx.export(
        _on_cpu(model),
        _to_cpu(arguments),
        kwargs=_to_cpu(keywords),
        dynamic_shapes=dynamic_shapes,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    return lambda path: program.save(str(path))


def _stablehlo_program(
    model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], *, text: bool
) -> Callable[[Path], None]:
    if not text:
        require("flatbuffers", 'export(format="stablehlo")', 'pip install "xlatrainer[stablehlo]"')
    placed = SingleDeviceStrategy().setup(copy.deepcopy(model)).eval()

    def forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        return list(tensors_in(predictions_of(placed(*args, **kwargs))))

    program = exported(forward, (_to_cpu(arguments), _to_cpu(keywords)))
    content = program.mlir_module().encode() if text else bytes(program.serialize())
    return lambda path: _write(path, content)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the model is called with the inputs of a batch: a dict by keyword, a tuple by position."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _on_cpu(model: nn.Module) -> nn.Module:
    """A copy on the CPU in eval mode, with its ties."""
    return SingleDeviceStrategy("cpu").setup(copy.deepcopy(model)).eval()


def _to_cpu(tree: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().cpu(), tree)
