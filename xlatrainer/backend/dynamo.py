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

from xlatrainer.backend._private_api import aot_autograd, size_hint
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
    _free_of_strides(graph)
    constants = [attrgetter(node.target)(graph) for node in graph.graph.nodes if node.op == "get_attr"]
    orders = [_order_of(node) for node in _outputs(graph)]

    def forward(*arguments: Any) -> list[Any]:
        results = graph.forward(*arguments)
        return [_laid_out(result, order) for result, order in zip(results, orders, strict=True)]

    step = ReplayedStep(forward, {"a constant": constants}, "a graph of torch.compile")

    def run(arguments: list[Any]) -> Any:
        taken = tuple(arguments)
        arguments.clear()  # the caller's list is all that keeps activations alive
        return step(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]  # torch's word for a function that takes such a list
    return run


# The graph was made with the strides that the CPU's or the meta kernels give results. Results of the device are
# contiguous, so the graph is made to work with whatever strides there are inside of it, and gives results that have the
# expected ones: torch makes views of them without looking.


def _free_of_strides(graph: fx.GraphModule) -> None:
    aten = torch.ops.aten
    for node in graph.graph.nodes:
        if node.target is aten.view.default:
            node.target = aten.reshape.default  # nothing is written in place here, so a copy is as good
        elif node.target is aten.as_strided.default:
            order = _order_of(node.args[0])
            node.target = _as_strided
            node.kwargs = {**node.kwargs, "order": order}
    graph.recompile()


def _as_strided(tensor: torch.Tensor, *args: Any, order: tuple[int, ...] | None) -> torch.Tensor:
    return torch.as_strided(_laid_out(tensor, order), *args)


def _outputs(graph: fx.GraphModule) -> Sequence[Any]:
    return next(node for node in graph.graph.nodes if node.op == "output").args[0]


def _order_of(node: Any) -> tuple[int, ...] | None:
    """The dims of a node's result from the outermost in memory to the innermost; None for what `expand` makes."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    strides = [size_hint(stride) for stride in value.stride()]
    return None if 0 in strides else tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))


def _laid_out(tensor: Any, order: tuple[int, ...] | None) -> Any:
    if order is None or not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.permute(order).is_contiguous():
        return tensor
    inverse = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)


def _refuse_other_devices(model: fx.GraphModule, inputs: Sequence[Any]) -> None:
    names = [node.target for node in model.graph.nodes if node.op == "placeholder"]
    for name, value in zip(names, inputs, strict=True):
        if isinstance(value, torch.Tensor) and value.device.type not in ("xla", "meta") and value.dim():
            raise RuntimeError(
                f'torch.compile(backend="openxla") compiles for the xla device, and the input {name} of shape '
                f'{tuple(value.shape)} is on {value.device}; move it, and the model, with .to("xla")'
            )
