"""The coefficient of determination."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.metrics.checks import split, value
from xlatrainer.metrics.r2 import R2

GENERATOR = torch.Generator().manual_seed(2)
TARGET = torch.randn(50, 3, generator=GENERATOR)
PREDICTION = TARGET + 0.3 * torch.randn(50, 3, generator=GENERATOR)


def expected(prediction: Tensor, target: Tensor) -> float:
    p, t = prediction.double().numpy(), target.double().numpy()
    return float(np.mean(1 - ((p - t) ** 2).sum(0) / ((t - t.mean(0)) ** 2).sum(0)))


@pytest.mark.parametrize("columns", [1, 3])
def test_equals_the_definition(columns: int) -> None:
    prediction, target = PREDICTION[:, :columns], TARGET[:, :columns]
    assert value(R2(columns), *split(prediction, target)) == pytest.approx(expected(prediction, target), abs=1e-6)
    if columns == 1:
        assert value(R2(), *split(prediction[:, 0], target[:, 0])) == pytest.approx(
            expected(prediction, target), abs=1e-6
        )


def test_a_large_mean_costs_no_digits() -> None:
    """float32 has about 7 digits: sums of squares would keep none of a spread of 1 around 4000."""
    prediction, target = PREDICTION[:, :1] + 4000, TARGET[:, :1] + 4000
    assert value(R2(), *split(prediction, target)) == pytest.approx(expected(prediction, target), abs=1e-3)


def test_shapes() -> None:
    for prediction, target in ((PREDICTION, TARGET), (PREDICTION[:, 0], TARGET[:, :1])):
        with pytest.raises(ValueError, match=r"r2 needs predictions and targets of the same shape with 1 value"):
            R2().update(prediction, target)


def test_before_the_first_batch() -> None:
    assert torch.isnan(R2().compute())
