"""Metrics of torchmetrics in the Trainer's steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.metrics.checks import split, value
from tests.trainer.helpers import class_batches, classifier
from xlatrainer.backend import counters
from xlatrainer.metrics.registry import resolve_metrics
from xlatrainer.metrics.torch_metric import TorchMetric
from xlatrainer.trainer.trainer import Trainer

torchmetrics = pytest.importorskip("torchmetrics")
classification = torchmetrics.classification

SCORES = torch.randn(40, 3, generator=torch.Generator().manual_seed(7))
CLASSES = torch.arange(40) % 3
OPTIONS = {"num_classes": 3, "validate_args": False}


def alone(metric: Any, *batches: tuple[Tensor, ...]) -> float:
    for batch in batches:
        metric.update(*batch)
    return float(metric.compute())


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(
    "kind", ["MulticlassAccuracy", "MulticlassF1Score", "MulticlassCohenKappa", "MulticlassJaccardIndex"]
)
def test_the_same_number_as_without_the_trainer(kind: str, device: str) -> None:
    make = getattr(classification, kind)
    batches = split(SCORES, CLASSES)
    assert value(TorchMetric(make(**OPTIONS)), *batches, device=device) == pytest.approx(
        alone(make(**OPTIONS), *batches)
    )


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_regressions_and_curves(device: str) -> None:
    batches = split(SCORES[:, 0], SCORES[:, 1])
    for make in (torchmetrics.MeanSquaredError, torchmetrics.R2Score, torchmetrics.PearsonCorrCoef):
        assert value(TorchMetric(make()), *batches, device=device) == pytest.approx(alone(make(), *batches), abs=1e-5)
    batches = split(torch.sigmoid(SCORES[:, 0]), CLASSES.clamp(max=1))
    options = {"thresholds": 50, "validate_args": False}
    curve = classification.BinaryAUROC
    assert value(TorchMetric(curve(**options)), *batches, device=device) == pytest.approx(
        alone(curve(**options), *batches)
    )


def test_one_execution_a_step_and_replayed() -> None:
    both = [classification.MulticlassAccuracy(**OPTIONS), classification.MulticlassF1Score(**OPTIONS)]
    trainer = Trainer(classifier(width=11), "sgd", metrics=[torchmetrics.MetricCollection(both), "accuracy"])
    batches = class_batches(rows=96)
    trainer.fit(batches, verbose=0)
    counters.reset()
    trainer.fit(batches, epochs=2, verbose=0)
    counts = counters.snapshot()
    assert (counts["Execute"], counts["Replay"]) == (12, 12)
    assert not [name for name in counts if "::" in name]
    values = trainer.evaluate(batches, verbose=0)
    scores, classes = trainer.predict(batches, verbose=0), torch.cat([y for _, y in batches])
    for kind in ("MulticlassAccuracy", "MulticlassF1Score"):
        assert values[kind] == pytest.approx(alone(getattr(classification, kind)(**OPTIONS), (scores, classes)))


def test_another_goes_on_from_its_state() -> None:
    first, second = (TorchMetric(classification.MulticlassAccuracy(**OPTIONS)) for _ in range(2))
    first.update(SCORES[:20], CLASSES[:20])
    second.load_state_dict(first.state_dict())
    second.update(SCORES[20:], CLASSES[20:])
    expected = alone(classification.MulticlassAccuracy(**OPTIONS), (SCORES, CLASSES))
    assert float(second.compute()) == pytest.approx(expected)


def test_names() -> None:
    squared = torchmetrics.MeanSquaredError()
    collection = torchmetrics.MetricCollection({"own": torchmetrics.MeanAbsoluteError()}, prefix="my_")
    names = [
        metric.name for metric in resolve_metrics([squared, TorchMetric(torchmetrics.R2Score(), "r2"), collection])
    ]
    assert names == ["MeanSquaredError", "r2", "my_own"]
    assert [metric.name for metric in resolve_metrics(collection)] == ["my_own"]


def test_deterministic_mode_is_put_back() -> None:
    metric = TorchMetric(classification.MulticlassAccuracy(**OPTIONS))
    metric.update(SCORES, CLASSES)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises((ValueError, RuntimeError)):
        metric.update(SCORES, CLASSES[:3])
    assert not torch.are_deterministic_algorithms_enabled()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="would read the values of every batch to validate them.*validate_args=False"):
        TorchMetric(classification.MulticlassAccuracy(num_classes=3)).to(torch.device("xla"))
    TorchMetric(classification.MulticlassAccuracy(num_classes=3)).to(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"keeps a list \(preds\) that grows with each batch.*thresholds=200"):
        TorchMetric(classification.BinaryAUROC())
    vector = TorchMetric(classification.MulticlassAccuracy(num_classes=3, average=None, validate_args=False))
    vector.update(SCORES, CLASSES)
    with pytest.raises(ValueError, match=r"computes a tensor of shape \(3,\); a log holds one number"):
        vector.compute()
    with pytest.raises(TypeError, match="'MeanSquaredError' cannot be one of weighted_metrics"):
        resolve_metrics([], [torchmetrics.MeanSquaredError()])
