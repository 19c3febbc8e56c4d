"""A table of a model's layers: output shapes, parameters, bytes, and what a forward pass computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from xlatrainer.backend import counters
from xlatrainer.backend.executor import run_pending
from xlatrainer.nested import tensors_in
from xlatrainer.strategies.strategy import Strategy
from xlatrainer.trainer.modes import evaluating
from xlatrainer.trainer.steps import call_model

__all__ = ["Layer", "Summary", "summarize"]


@dataclass
class Layer:
    """A module without children, or one with parameters of its own.

    Attributes:
        name, kind: Its name in the model, and its class.
        shapes: Of its outputs at its latest call; empty if it was not called, or there was no example.
        num_parameters, num_bytes: Of its own parameters, those left out that an earlier layer has too.
        tied: The names of the parameters left out, with the earlier ones they are.
    """

    name: str
    kind: str
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    num_parameters: int = 0
    num_bytes: int = 0
    tied: dict[str, str] = field(default_factory=dict)


@dataclass
class Summary:
    """What `Trainer.summary` found; printing it gives a table.

    Attributes:
        layers: In the order of their first call, or of their definition without an example.
        num_parameters, num_trainable: Elements of all parameters, tied ones once, and of those that are trained.
        num_bytes, buffer_bytes: Of the parameters, and of the buffers.
        flops: Floating-point operations of the forward pass of the example, by XLA's cost analysis; None without an
            example, where XLA does not compute it, and where the model reads values, so that it is no single program.
    """

    layers: list[Layer]
    num_parameters: int
    num_trainable: int
    num_bytes: int
    buffer_bytes: int
    flops: float | None

    def __str__(self) -> str:
        rows = [("Layer", "Output shape", "Parameters", "Bytes")]
        for layer in self.layers:
            shapes = ", ".join(map(str, layer.shapes)) or "-"
            notes = "".join(f", {name} is {first}" for name, first in layer.tied.items())
            title = f"{layer.name or 'the model'} ({layer.kind}{notes})"
            rows.append((title, shapes, f"{layer.num_parameters:,}", f"{layer.num_bytes:,}"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}"
            for row in rows
        ]
        rule = "-" * len(lines[0])
        frozen = self.num_parameters - self.num_trainable
        totals = [
            f"Parameters: {self.num_parameters:,} ({self.num_trainable:,} trained, {frozen:,} frozen)",
            f"Memory: {self.num_bytes:,} bytes of parameters, {self.buffer_bytes:,} of buffers",
        ]
        if self.flops is not None:
            totals.append(f"Forward pass: {self.flops:,.0f} floating-point operations")
        return "\n".join([lines[0], rule, *lines[1:], rule, *totals])

    __repr__ = __str__


def summarize(model: nn.Module, strategy: Strategy, example: Any = None) -> Summary:
    """The `Summary` of `model`.

    Args:
        model: On the strategy's device.
        strategy: Where it is.
        example: The model's inputs: a tensor or array, a tuple of the positional arguments or a dict of the keyword
            arguments; default None, which leaves out shapes and operations.
    """
    layers, flops = _described(model), None
    if example is not None:
        inputs = strategy.to_device(example)
        strategy.end_step()
        with evaluating(model), torch.no_grad(), strategy.loop(), _shapes_noted(model, layers):
            before = counters.value("Execute")
            output = call_model(model, inputs)
            is_whole = counters.value("Execute") == before
            program = run_pending("a model is summarized") if strategy.device.type == "xla" else None
            del output
        flops = program.cost().get("flops") if program is not None and is_whole else None
    parameters = list(model.parameters())
    return Summary(
        list(layers.values()),
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sum(map(_bytes, parameters)),
        sum(map(_bytes, model.buffers())),
        flops,
    )


def _described(model: nn.Module) -> dict[str, Layer]:
    seen: dict[int, str] = {}
    layers = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not own and next(module.children(), None) is not None:
            continue
        layer = layers[name] = Layer(name, type(module).__name__)
        for leaf, parameter in own.items():
            full = f"{name}.{leaf}" if name else leaf
            first = seen.setdefault(id(parameter), full)
            if first != full:
                layer.tied[leaf] = first
            else:
                layer.num_parameters += parameter.numel()
                layer.num_bytes += _bytes(parameter)
    return layers


@contextmanager
def _shapes_noted(model: nn.Module, layers: dict[str, Layer]) -> Iterator[None]:
    """Note the output shapes of the layers while the model is called, and put those into the order of their calls."""
    called: dict[str, None] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            layers[name].shapes = [tuple(tensor.shape) for tensor in tensors_in(output)]
            called.setdefault(name)

        return hook

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(note(name)) for name in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    ordered = {name: layers.pop(name) for name in called}
    rest = dict(layers)
    layers.clear()
    layers.update({**ordered, **rest})


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
