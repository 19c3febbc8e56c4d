"""Errors of a regression."""

import pytest
import torch

from tests.metrics.checks import split, value
from xlatrainer.metrics.error import RootMeanSquaredError, cosine_similarity
from xlatrainer.metrics.mean import MeanMetric

PREDICTION, TARGET = torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(1))


def test_rmse_is_the_root_over_all_batches() -> None:
    expected = (PREDICTION - TARGET).square().mean().sqrt().item()
    assert value(RootMeanSquaredError(), *split(PREDICTION, TARGET)) == pytest.approx(expected, abs=1e-6)


def test_cosine_similarity() -> None:
    dots = (PREDICTION * TARGET).sum(1) / (PREDICTION.norm(dim=1) * TARGET.norm(dim=1))
    metric = MeanMetric(cosine_similarity)
    assert metric.name == "cosine_similarity"
    assert value(metric, *split(PREDICTION, TARGET)) == pytest.approx(dots.mean().item(), abs=1e-6)
    with pytest.raises(ValueError, match=r"needs predictions and targets \(N, ..., D\) of the same shape, got \(3,\)"):
        cosine_similarity(torch.ones(3), torch.ones(3))
