"""Metrics by name, function and object."""

from typing import Any

import pytest
import torch
from torch import Tensor

from xlatrainer.metrics.accuracy import Accuracy
from xlatrainer.metrics.registry import METRICS, resolve_metrics


def bias(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).mean()


def test_every_name_gives_a_metric_of_that_name() -> None:
    assert [metric.name for metric in resolve_metrics(list(METRICS))] == list(METRICS)


def test_functions_and_objects() -> None:
    accuracy = Accuracy(name="acc")
    metrics = resolve_metrics([bias, accuracy])
    assert [metric.name for metric in metrics] == ["bias", "acc"]
    assert metrics[1] is accuracy


def test_errors_of_a_regression() -> None:
    prediction, target = torch.randn(2, 9, 2)
    for name, expected in (("mae", (prediction - target).abs()), ("mse", (prediction - target).square())):
        (metric,) = resolve_metrics([name])
        for p, t in zip(prediction.split(4), target.split(4), strict=True):
            metric.update(p, t)
        assert float(metric.compute()) == pytest.approx(float(expected.mean()), abs=1e-6)
        with pytest.raises(ValueError, match=r"predictions \(9, 1\) and targets \(9,\) must have the same shape"):
            metric.update(torch.zeros(9, 1), torch.zeros(9))


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        (["acc"], ValueError, r"unknown metric 'acc'; the names are \['accuracy', 'mae', 'mse', 'top5_accuracy'\]"),
        (["mae", "mae"], ValueError, "two values would be logged as 'mae'"),
        ([Accuracy(name="loss")], ValueError, "two values would be logged as 'loss'"),
        ([Accuracy], TypeError, r"create one, Accuracy\(...\)"),
        ([3], TypeError, "got 3"),
    ],
)
def test_refusals(metrics: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_metrics(metrics)
