"""Accuracy for every kind of task that shapes and dtypes tell apart, and refusal of the rest."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.helpers import DEVICES
from xlatrainer.metrics.accuracy import Accuracy, TopKAccuracy

SCORES = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [2.0, 1.0, 3.0], [3.0, 1.0, 2.0]])
CLASSES = torch.tensor([0, 1, 0, 2])


def value(metric: Any, prediction: Tensor, target: Tensor) -> float:
    metric.update(prediction, target)
    return float(metric.compute())


@pytest.mark.parametrize("device", DEVICES)
def test_classes(device: str) -> None:
    metric = Accuracy().to(torch.device(device))
    assert value(metric, SCORES.to(device), CLASSES.to(device)) == 0.5
    assert value(metric, SCORES[:1].to(device), CLASSES[:1].to(device)) == pytest.approx(3 / 5)


def test_classes_of_pixels_and_small_integers() -> None:
    scores = SCORES.t().reshape(1, 3, 2, 2)
    assert value(Accuracy(), scores, CLASSES.reshape(1, 2, 2).to(torch.uint8)) == 0.5


def test_one_hot() -> None:
    assert value(Accuracy(), SCORES, torch.nn.functional.one_hot(CLASSES, 3).float()) == 0.5


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_binary(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = torch.tensor([-1.0, 0.4, 2.0, -0.2])
    target = torch.tensor([0, 1, 1, 1]).to(dtype)
    assert value(Accuracy(threshold=0.0), logits.reshape(shape), target) == 0.75
    assert value(Accuracy(threshold=0.5), logits.reshape(shape), target) == 0.5
    assert value(Accuracy(threshold=0.0), logits.reshape(shape), target.reshape(4, 1)) == 0.75
    with pytest.raises(ValueError, match=r"may be a logit or a probability; use Accuracy\(threshold=0.0\)"):
        Accuracy().update(logits.reshape(shape), target)


@pytest.mark.parametrize(
    ("prediction", "target"), [(SCORES, torch.zeros(3, dtype=torch.int64)), (SCORES, torch.zeros(4, 3).long())]
)
def test_what_does_not_go_together(prediction: Tensor, target: Tensor) -> None:
    with pytest.raises(ValueError, match=r"predictions of shape \(4, 3\) and torch.int64 targets of shape"):
        Accuracy().update(prediction, target)


@pytest.mark.parametrize("device", DEVICES)
def test_top_k(device: str) -> None:
    metric = TopKAccuracy(2).to(torch.device(device))
    assert metric.name == "top2_accuracy"
    assert value(metric, SCORES.to(device), CLASSES.to(device)) == 1.0
    assert value(TopKAccuracy(1), SCORES, CLASSES) == 0.5


def test_top_k_of_pixels() -> None:
    assert value(TopKAccuracy(2), SCORES.t().reshape(1, 3, 2, 2), torch.tensor([[[0, 1], [1, 1]]])) == 0.5


def test_top_k_needs_enough_classes() -> None:
    with pytest.raises(ValueError, match=r"top5_accuracy needs scores .* of at least 5 classes.*got \(4, 3\)"):
        TopKAccuracy().update(SCORES, CLASSES)
