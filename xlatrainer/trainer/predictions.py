"""`Predictions`: the outputs of `predict`, brought to the CPU while later batches run."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from xlatrainer.nested import map_tensors, tensors_in
from xlatrainer.strategies.strategy import Strategy

__all__ = ["Predictions"]

_BATCHES_ON_DEVICE = 4  # enough that the device is never idle, few enough that its memory does not fill up


class Predictions:
    """Collects outputs batch by batch.

    Args:
        strategy: Fetches the tensors.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._on_device: deque[Any] = deque()
        self._structure: Any = None
        self._columns: list[list[Tensor]] = []

    def add(self, output: Any, rows: int | None = None) -> None:
        """Take in the output of a batch: tensors of shape (rows, ...), nested the same way every time.

        Args:
            output: On the device.
            rows: How many rows to keep, the others pad the batch; default None, all.
        """
        self._on_device.append((output, rows))
        if len(self._on_device) > _BATCHES_ON_DEVICE:
            self._fetch_oldest()

    def concatenated(self) -> Any:
        """All outputs on the CPU, each tensor of the structure concatenated over its rows."""
        while self._on_device:
            self._fetch_oldest()
        columns = iter(self._columns)
        return map_tensors(lambda _: torch.cat(next(columns)), self._structure)

    def _fetch_oldest(self) -> None:
        output, rows = self._on_device.popleft()
        fetched = self._strategy.fetch(list(tensors_in(output)))
        if not self._columns:
            self._structure = map_tensors(lambda _: torch.empty(0), output)
            self._columns = [[] for _ in fetched]
        for column, tensor in zip(self._columns, fetched, strict=True):
            if tensor.dim() == 0:
                raise ValueError("predict needs outputs of shape (rows, ...); the model returned a tensor of shape ()")
            column.append(tensor[:rows])
