"""Graphs as text, for people and into files: `graph`, `hlo`, and what `XLA_SAVE_TENSORS_FILE` collects."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from xlatrainer import config
from xlatrainer.backend.ir import Node
from xlatrainer.backend.program import Graph
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import value_of

__all__ = ["append", "dot", "graph", "hlo", "save_graph"]


def graph(tensor: torch.Tensor, format: str = "text") -> str:
    """What was recorded to compute a tensor and has not run yet.

    Args:
        tensor: on the `xla` device.
        format: "text", a line for each operator with the user's line, or "dot", for Graphviz. Default "text".

    Raises:
        ValueError: for another format, or a tensor of another device.

    Example:
        >>> import torch, xlatrainer as xla
        >>> print(xla.debug.graph(torch.ones(2).to("xla").exp()).partition("  #")[0])
        %0 = xla::device_data() : float32[2]
    """
    if format not in ("text", "dot"):
        raise ValueError(f'the format of a graph is "text" or "dot", not {format!r}')
    nodes, _ = _recorded(tensor)
    return dot(_needed(nodes)) if format == "dot" else "\n".join(_lines(nodes)) + "\n"


def hlo(tensor: torch.Tensor, format: str = "hlo") -> str:
    """The program that would compute a tensor, as XLA takes it: not yet optimized, and without running anything.

    Args:
        tensor: on the `xla` device.
        format: "hlo" or "stablehlo". Default "hlo".

    Raises:
        ValueError: for another format, or a tensor of another device.
    """
    if format not in ("hlo", "stablehlo"):
        raise ValueError(f'the format of a program is "hlo" or "stablehlo", not {format!r}')
    nodes, slot = _recorded(tensor)
    return program_text(Graph(nodes[-1], (slot,), state.trace.home), format)


def program_text(graph: Graph, form: str) -> str:
    """A graph as "hlo" or "stablehlo", with the user's lines if `XLA_HLO_DEBUG` asks for them."""
    return str(graph.lowered().as_text(dialect=form, debug_info=config.get("hlo_debug") == "1"))


def _recorded(tensor: torch.Tensor) -> tuple[list[Node], int]:
    """The nodes of the pending trace that the tensor's value depends on, and those before; and the value's slot."""
    if tensor.device.type != "xla":
        raise ValueError(f"only tensors of the xla device have a graph; this one is on {tensor.device}")
    with state.lock:
        value = value_of(tensor.detach())
        slot = state.trace.slot_of(value)
        nodes = state.trace.node.path()
    end = next(index for index, node in enumerate(nodes) if node.num_slots > slot)
    return nodes[: end + 1], slot


def _needed(nodes: Sequence[Node]) -> list[Node]:
    """Of a path the nodes that its last one depends on."""
    wanted = set(nodes[-1].operands)
    kept = [nodes[-1]]
    for node in reversed(nodes[:-1]):
        if wanted & set(_slots(node)):
            kept.append(node)
            wanted.update(node.operands)
    return kept[::-1]


def _slots(node: Node) -> range:
    return range(node.num_slots - len(node.operation.outputs), node.num_slots)


def _lines(nodes: Sequence[Node]) -> list[str]:
    texts = dict(zip(nodes, nodes[-1].text(), strict=True))
    return [texts[node] for node in _needed(nodes)]


def dot(nodes: Sequence[Node]) -> str:
    """These nodes, with all that they depend on among them, for Graphviz."""
    return "digraph G {\n" + "".join(f"  {line}\n" for line in _dot_lines(nodes)) + "}\n"


def _dot_lines(nodes: Sequence[Node]) -> Iterator[str]:
    owner = {slot: index for index, node in enumerate(nodes) for slot in _slots(node)}
    for index, node in enumerate(nodes):
        results = ", ".join(map(repr, node.operation.outputs))
        label = f"{node.operation}\\n{results}\\n{node.line}".replace('"', "'")
        shape = "ellipse" if node.operation.lower is not None else "box"
        yield f'n{index} [shape={shape}, label="{label}"];'
        for number, slot in enumerate(node.operands):
            yield f'n{owner[slot]} -> n{index} [label="{number}"];'


def save_graph(program: Graph) -> None:
    """Append a graph that is run to the file of `XLA_SAVE_TENSORS_FILE`, in the form of `XLA_SAVE_TENSORS_FMT`."""
    form = config.get("save_tensors_format")
    if form == "text":
        text = "IR {\n" + "".join(f"  {line}\n" for line in program.text()) + "}\n"
    elif form == "dot":
        text = dot(program.nodes)
    else:
        text = program_text(program, form)
    outputs = ", ".join(f"%{slot}" for slot in program.outputs)
    append(
        f"{config.get('save_tensors_file')}.0",
        f"[ScheduleSyncTensorsGraph]\n\n## BEGIN_GRAPH\n{text}\nROOT ({outputs})\n\n## END_GRAPH\n\n\n",
    )


def append(path: Any, text: str) -> None:
    """Write to the end of a file, which is made if need be."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(text)
