"""How two recorded graphs differ: the first operator or input that is not the same, in words.

May import: ir.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xlatrainer.backend.ir import Node, Spec

__all__ = ["Difference", "difference", "nearest"]


@dataclass(frozen=True)
class Difference:
    """The first difference of a graph from an earlier one.

    Attributes:
        kind: "shape", "dtype", "constant", "operator", "operands" or "length".
        text: what it is.
        line: the user's line that it comes from.
    """

    kind: str
    text: str
    line: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} ({self.line})"


def difference(before: Node, now: Node) -> Difference | None:
    """The first difference of the graph that ends in `now` from the one that ends in `before`, if there is any."""
    old_path, new_path = before.path(), now.path()
    for old, new in zip(old_path, new_path, strict=False):
        if old is new:
            continue
        if old.operation is new.operation and old.operands == new.operands:
            continue  # the same, behind an earlier difference: not reached
        if old.operation.lower is None and new.operation.lower is None:
            return _of_inputs(old, new, new_path)
        if old.operation is new.operation:
            return Difference("operands", f"{new.operation.name} takes other operands than before", new.line)
        return _of_operations(old, new)
    if len(old_path) == len(new_path):
        return None
    if len(new_path) > len(old_path):
        first = new_path[len(old_path)]
        text = f"{len(new_path) - len(old_path)} more operators than before, the first of them {first.operation.name}"
        return Difference("length", text, first.line)
    first = old_path[len(new_path)]
    text = f"{len(old_path) - len(new_path)} fewer operators than before, the first of them {first.operation.name}"
    return Difference("length", text, first.line)


def _of_inputs(old: Node, new: Node, path: Sequence[Node]) -> Difference:
    before, now = old.operation.outputs[0], new.operation.outputs[0]
    slot = new.num_slots - 1
    number = sum(node.operation.lower is None for node in path[: path.index(new)])
    user = next((node for node in path if slot in node.operands), new)
    kind, text = _of_specs(before, now)
    taken = f", taken by {user.operation.name}" if user is not new else ""
    return Difference(kind, f"input {number} of the graph {text}{taken}", user.line)


def _of_operations(old: Node, new: Node) -> Difference:
    before, now = old.operation, new.operation
    if before.name != now.name:
        return Difference("operator", f"{now.name}, where it was {before.name} at {old.line}", new.line)
    if before.detail != now.detail:
        return Difference("constant", f"{now.name}({now.detail}), where it was {now.name}({before.detail})", new.line)
    for index, (first, second) in enumerate(zip(before.outputs, now.outputs, strict=False)):
        if first is not second:
            kind, text = _of_specs(first, second)
            return Difference(kind, f"result {index} of {now.name} {text}", new.line)
    return Difference("constant", f"{now.name} was given another setting than before", new.line)


def _of_specs(before: Spec, now: Spec) -> tuple[str, str]:
    if before.dtype is not now.dtype:
        return "dtype", f"is {now}, was {before}"
    if len(before.shape) != len(now.shape):
        return "shape", f"has {len(now.shape)} dimensions, had {len(before.shape)}: is {now}, was {before}"
    sizes = zip(before.shape, now.shape, strict=True)
    changed = [f"dimension {dim} was {old}, is {new}" for dim, (old, new) in enumerate(sizes) if old != new]
    return "shape", f"is {now}, was {before}: {', '.join(changed)}"


def nearest(now: Node, earlier: Iterable[Node]) -> Node | None:
    """Of graphs, by their ends, the one whose operators are most like those of `now`; of equals the last."""
    names = [node.operation.name for node in now.path()]
    best, most = None, -1.0
    for end in earlier:
        path = end.path()
        alike = sum(node.operation.name == name for node, name in zip(path, names, strict=False))
        share = alike / max(len(path), len(names), 1)
        if share >= most:
            best, most = end, share
    return best
