"""Outputs come to the CPU in order, while only a few batches of them are on the device."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from xlatrainer.strategies.single import SingleDeviceStrategy
from xlatrainer.trainer.predictions import Predictions


class Lazy(SingleDeviceStrategy):
    """CPU, but what was fetched is noted."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.num_fetched = 0

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.num_fetched += 1
        return super().fetch(tensors)


def test_order_and_structure() -> None:
    strategy = Lazy()
    predictions = Predictions(strategy)
    waiting = []
    for batch in range(10):
        rows = torch.full((2, 3), float(batch))
        predictions.add({"a": rows, "b": [rows[:, 0]]})
        waiting.append(batch + 1 - strategy.num_fetched)
    assert max(waiting) == 4
    result = predictions.concatenated()
    assert torch.equal(result["a"][:, 0], torch.arange(10.0).repeat_interleave(2))
    assert torch.equal(result["b"][0], result["a"][:, 0])


def test_an_output_without_rows() -> None:
    predictions = Predictions(Lazy())
    predictions.add(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"outputs of shape \(rows, ...\)"):
        predictions.concatenated()
