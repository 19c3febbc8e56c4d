"""A model's graph for TensorBoard, from `torch.export`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from xlatrainer.optional import require

__all__ = ["write_graph"]


def write_graph(writer: Any, model: nn.Module, example: Any) -> None:
    """Write the operators of `model`, grouped by module, into the event file of a `SummaryWriter`.

    Args:
        writer: The `SummaryWriter`.
        model: On any device; a copy of it on the CPU is exported, in eval mode.
        example: Its input, or a tuple of its inputs.

    Raises:
        ValueError: If `torch.export` cannot follow the model.
    """
    protos = {
        name: require(f"tensorboard.compat.proto.{name}_pb2", "the graph", 'pip install "xlatrainer[tensorboard]"')
        for name in ("graph", "node_def", "config", "step_stats")
    }
    args = example if isinstance(example, tuple) else (example,)
    on_cpu = copy.deepcopy(model).cpu().eval()
    with torch.no_grad():
        args = tuple(arg.detach().cpu() if isinstance(arg, torch.Tensor) else arg for arg in args)
        try:
            exported = torch.export.export(on_cpu, args)
        except Exception as error:
            raise ValueError(f"the graph of {type(model).__name__} cannot be written: torch.export failed") from error
    graph = protos["graph"].GraphDef()
    names: dict[Any, str] = {}
    for node in exported.graph.nodes:
        scopes = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
        names[node] = "/".join([*(scopes[-1:] and [scopes[-1].replace(".", "/")]), node.name])
        graph.node.append(
            protos["node_def"].NodeDef(
                name=names[node],
                op=str(node.target) if node.op == "call_function" else node.op,
                input=[names[source] for source in node.all_input_nodes],
            )
        )
    metadata = protos["config"].RunMetadata(step_stats=protos["step_stats"].StepStats())
    writer.file_writer.add_graph((graph, metadata))
