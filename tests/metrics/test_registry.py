"""Metrics by name, function and object."""

from typing import Any

import pytest
import torch
from torch import Tensor

from xlatrainer.metrics.accuracy import Accuracy
from xlatrainer.metrics.error import absolute_error
from xlatrainer.metrics.mean import MeanMetric
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


def test_the_threshold_of_the_loss_reaches_all_that_need_it() -> None:
    names = ["accuracy", "binary_accuracy", "precision", "recall", "f1", "auc"]
    logits, target = torch.tensor([-1.0, 0.3, 2.0]), torch.tensor([0.0, 1.0, 1.0])
    for metric in resolve_metrics(names, threshold=0.0):
        metric.update(logits, target)
        assert float(metric.compute()) == 1.0
    for metric in resolve_metrics(names):
        with pytest.raises(ValueError, match=r"may be a logit or a probability; use \w+\(threshold=0.0\)"):
            metric.update(logits, target)


def test_weighted_metrics() -> None:
    own = MeanMetric(absolute_error, "own")
    metrics = resolve_metrics(["mae"], ["mae", "accuracy", own])
    assert [(m.name, m.weighted) for m in metrics] == [
        ("mae", False),
        ("weighted_mae", True),
        ("accuracy", True),
        ("own", True),
    ]
    with pytest.raises(ValueError, match="'own' is given twice"):
        resolve_metrics([own], [own])
    with pytest.raises(TypeError, match=r"weighted_metrics must be a list, such as \['mae'\]"):
        resolve_metrics([], "mae")


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        (["acc"], ValueError, r"unknown metric 'acc'; the names are \['accuracy', 'auc', 'binary_accuracy'"),
        (["mae", "mae"], ValueError, "two values would be logged as 'mae'"),
        ([Accuracy(name="loss")], ValueError, "two values would be logged as 'loss'"),
        ([Accuracy], TypeError, r"create one, Accuracy\(...\)"),
        ([3], TypeError, "got 3"),
        ({"a": "mae"}, TypeError, "must be a list of metrics, got dict"),
    ],
)
def test_refusals(metrics: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_metrics(metrics)
