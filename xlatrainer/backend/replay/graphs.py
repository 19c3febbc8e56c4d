"""`GraphLimit`: how many different graphs a function may come to.

May import: differences, ir, errors.
"""

from xlatrainer.backend.differences import difference, nearest
from xlatrainer.backend.ir import Node
from xlatrainer.errors import GraphLimitError

__all__ = ["GraphLimit"]


class GraphLimit:
    """Counts the different graphs of a function.

    Args:
        name: of the function.
        allowed: how many there may be; None for any number.
    """

    def __init__(self, name: str, allowed: int | None) -> None:
        self.name = name
        self.allowed = allowed
        self._seen: dict[Node, None] = {}

    def note(self, graph: Node) -> None:
        """Take note of a graph, by its end. Raises `GraphLimitError` for one too many."""
        if self.allowed is None or graph in self._seen or graph.parent is None:
            return
        self._seen[graph] = None
        if len(self._seen) <= self.allowed:
            return
        others = [end for end in self._seen if end is not graph]
        like = nearest(graph, others)
        change = None if like is None else difference(like, graph)
        raise GraphLimitError(
            f"{self.name} has come to {len(self._seen)} different graphs, and {self.allowed} are allowed "
            f"(num_different_graphs_allowed). The latest differs from the one most like it in {change}"
        )
