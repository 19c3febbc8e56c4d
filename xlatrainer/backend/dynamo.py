"""`torch.compile(model, backend="openxla")`: each graph that TorchDynamo finds is one program on the device.

Imported when torch looks for its backends, not before: TorchDynamo takes seconds to load. AOTAutograd makes a forward
and a backward graph of plain ATen operators. Each becomes a `ReplayedStep`, so its calls are programs of their own, and
the generated Python of the graph runs no more once two calls were alike.

May import: replay, _private_api.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from xlatrainer.backend._private_api import aot_autograd
from xlatrainer.backend.replay.step import ReplayedStep

__all__ = ["openxla"]


def openxla(
    model: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend, as `torch.compile` calls it.

    Args:
        model: the graph.
        inputs: fake tensors in the place of its inputs, parameters and buffers among them.
        options: what `torch.compile` was given as such: there are none.

    Returns:
        A function of the same inputs.

    Raises:
        TypeError: for options.
        RuntimeError: if an input is not on the device.
    """
    if options:
        raise TypeError(f"the backend openxla has no options, got {sorted(options)}")
    _refuse_other_devices(model, inputs)
    return aot_autograd(_compiled)(model, inputs)


def _compiled(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    constants = [attrgetter(node.target)(graph) for node in graph.graph.nodes if node.op == "get_attr"]
    step = ReplayedStep(graph.forward, {"a constant": constants}, "a graph of torch.compile")

    def run(arguments: list[Any]) -> Any:
        taken = tuple(arguments)
        arguments.clear()  # the caller's list is all that keeps activations alive
        return step(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]  # torch's word for a function that takes such a list
    return run


def _refuse_other_devices(model: fx.GraphModule, inputs: Sequence[Any]) -> None:
    names = [node.target for node in model.graph.nodes if node.op == "placeholder"]
    for name, value in zip(names, inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.device.type not in ("xla", "meta") and value.dim():
            raise RuntimeError(
                f'torch.compile(backend="openxla") compiles for the xla device, and the input {name} of shape '
                f'{tuple(value.shape)} is on {value.device}; move it, and the model, with .to("xla")'
            )
