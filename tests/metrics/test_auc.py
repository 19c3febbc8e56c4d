"""The area under the ROC curve, from counts between thresholds."""

import pytest
import torch
from torch import Tensor

from tests.metrics.checks import split, value
from xlatrainer.metrics.auc import AUC

GENERATOR = torch.Generator().manual_seed(3)
BITS = torch.randint(0, 2, (300,), generator=GENERATOR)
SCORES = torch.randn(300, generator=GENERATOR) + BITS


def of_pairs(scores: Tensor, bits: Tensor) -> float:
    """The definition: of all pairs of one example of each class, the share in the right order; a tie is one half."""
    apart = scores[bits == 1][:, None] - scores[bits == 0][None, :]
    return ((apart > 0).double() + (apart == 0).double() / 2).mean().item()


def at_thresholds(probabilities: Tensor, bits: Tensor, number: int = 200) -> float:
    """As Keras computes it: rates at each threshold, and trapezoids between them."""
    steps = torch.linspace(0, 1, number, dtype=torch.float64)
    steps[0], steps[-1] = -1e-7, 1 + 1e-7
    above = probabilities.double()[None, :] > steps[:, None]
    rates = [(above & (bits == kind)).sum(1) / (bits == kind).sum() for kind in (1, 0)]
    return torch.trapezoid(rates[0].flip(0).double(), rates[1].flip(0).double()).item()


def test_of_logits_and_probabilities() -> None:
    probabilities = torch.sigmoid(SCORES)
    expected = at_thresholds(probabilities, BITS)
    assert value(AUC(threshold=0.0), *split(SCORES, BITS)) == pytest.approx(expected, abs=1e-6)
    assert value(AUC(threshold=0.5), *split(probabilities, BITS)) == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(of_pairs(SCORES, BITS), abs=0.01)


def test_shapes() -> None:
    expected = value(AUC(threshold=0.0), (SCORES, BITS))
    two = torch.stack([torch.ones(300), SCORES + 1], 1)
    assert value(AUC(), (two, BITS)) == pytest.approx(expected, abs=1e-6)
    for prediction, target in (
        (SCORES[:, None], BITS),
        (SCORES[:, None], BITS[:, None].float()),
        (SCORES, BITS[:, None]),
    ):
        assert value(AUC(threshold=0.0), (prediction, target)) == expected
    with pytest.raises(ValueError, match=r"auc needs one score an example.*got \(300, 3\) and \(300,\)"):
        AUC(threshold=0.0).update(torch.zeros(300, 3), BITS)
    with pytest.raises(ValueError, match=r"use AUC\(threshold=0.0\) for logits"):
        AUC().update(SCORES, BITS)
    with pytest.raises(ValueError, match="num_thresholds must be at least 2, got 1"):
        AUC(num_thresholds=1)


def test_it_is_exact_for_scores_on_the_thresholds() -> None:
    """Between two thresholds all scores tie: more thresholds, more exact."""
    grid = torch.arange(1, 11) / 10
    scores = grid[torch.randint(0, 10, (300,), generator=GENERATOR)]
    assert value(AUC(threshold=0.5, num_thresholds=11), *split(scores, BITS)) == pytest.approx(
        of_pairs(scores, BITS), abs=1e-6
    )
    crowded = torch.sigmoid(SCORES) / 500
    assert value(AUC(threshold=0.5), (crowded, BITS)) == 0.5
    exact = value(AUC(threshold=0.5, num_thresholds=100_001), (crowded, BITS))
    assert exact == pytest.approx(of_pairs(crowded, BITS), abs=0.01)


def test_one_class_alone() -> None:
    metric = AUC(threshold=0.0)
    metric.update(SCORES, torch.ones(300))
    assert torch.isnan(metric.compute())
