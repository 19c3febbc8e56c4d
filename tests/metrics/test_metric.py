"""The state of a metric: on its device, reset to what it was declared with."""

import torch
from torch import Tensor

from xlatrainer.metrics.metric import Metric


class Seen(Metric):
    rows: Tensor

    def __init__(self) -> None:
        super().__init__("seen")
        self.add_state("rows", torch.zeros(2))

    def update(self, prediction: Tensor, target: Tensor) -> None:  # type: ignore[override]
        self.rows += prediction

    def compute(self) -> Tensor:
        return self.rows.sum()


def test_reset_undoes_updates_in_place_too() -> None:
    metric = Seen()
    for _ in range(2):
        metric.update(torch.ones(2), torch.ones(2))
        assert metric.compute() == 2
        metric.reset()


def test_to_moves_and_resets() -> None:
    metric = Seen()
    metric.update(torch.ones(2), torch.ones(2))
    assert metric.to(torch.device("meta")) is metric
    assert metric.rows.device.type == "meta"
    assert metric.to(torch.device("cpu")).compute() == 0
