"""Weights of rows in all metrics that take them; what each of them computes is in its own file."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.metrics.checks import check_weights, value
from xlatrainer.metrics.accuracy import Accuracy, BinaryAccuracy, TopKAccuracy
from xlatrainer.metrics.auc import AUC
from xlatrainer.metrics.error import RootMeanSquaredError, absolute_error, cosine_similarity
from xlatrainer.metrics.mean import Mean, MeanMetric
from xlatrainer.metrics.metric import Metric, update_metrics
from xlatrainer.metrics.perplexity import Perplexity
from xlatrainer.metrics.precision_recall import F1, Precision, Recall
from xlatrainer.metrics.r2 import R2
from xlatrainer.metrics.weights import full_weight, weighted_sum

ROWS = 40
GENERATOR = torch.Generator().manual_seed(5)
SCORES = torch.randn(ROWS, 4, generator=GENERATOR)
CLASSES = torch.randint(0, 4, (ROWS,), generator=GENERATOR)
LOGITS = torch.randn(ROWS, generator=GENERATOR)
BITS = torch.randint(0, 2, (ROWS,), generator=GENERATOR)
VALUES = torch.randn(ROWS, 3, generator=GENERATOR)

CASES: dict[str, tuple[Callable[[], Metric], Tensor, Tensor]] = {
    "accuracy": (Accuracy, SCORES, CLASSES),
    "accuracy of pixels": (
        Accuracy,
        torch.randn(ROWS, 4, 5, generator=GENERATOR),
        torch.arange(ROWS * 5).reshape(ROWS, 5) % 4,
    ),
    "binary accuracy": (lambda: BinaryAccuracy(0.0), LOGITS, BITS),
    "binary accuracy of columns": (lambda: BinaryAccuracy(0.0), VALUES, (VALUES.roll(1) > 0).float()),
    "top2": (lambda: TopKAccuracy(2), SCORES, CLASSES),
    "auc": (lambda: AUC(0.0), LOGITS, BITS),
    "precision": (Precision, SCORES, CLASSES),
    "recall": (Recall, SCORES, CLASSES),
    "f1": (lambda: F1(0.0), LOGITS, BITS),
    "mae": (lambda: MeanMetric(absolute_error, "mae"), SCORES[:, :3], VALUES),
    "rmse": (RootMeanSquaredError, SCORES[:, :3], VALUES),
    "r2": (R2, LOGITS, VALUES[:, 0]),
    "r2 of columns": (lambda: R2(3), SCORES[:, :3], VALUES),
    "cosine": (lambda: MeanMetric(cosine_similarity), SCORES[:, :3], VALUES),
    "perplexity": (Perplexity, SCORES, CLASSES),
    "perplexity of tokens": (
        lambda: Perplexity(shift=True),
        torch.randn(ROWS, 6, 4, generator=GENERATOR),
        torch.randint(0, 4, (ROWS, 6), generator=GENERATOR),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights(name: str) -> None:
    check_weights(*CASES[name])


def test_sums() -> None:
    nan = float("nan")
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [nan, nan]])
    assert weighted_sum(values[:2], None) == (10.0, 4)
    total, weight = weighted_sum(values, torch.tensor([True, True, False]))
    assert (total, weight, weight.dtype) == (10.0, 4, torch.int64)
    total, weight = weighted_sum(values, torch.tensor([0.5, 2.0, 0.0]))
    assert (total, weight) == (15.5, 5.0)
    total, weight = weighted_sum(values, torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    assert (total, weight) == (5.0, 2.0)
    with pytest.raises(ValueError, match=r"of shape \(2,\) do not go with values of shape \(3, 2\)"):
        full_weight(torch.ones(2), values)


@pytest.mark.parametrize("metric", [Accuracy(0.5), AUC(0.5), F1(0.5)], ids=lambda metric: metric.name)
def test_counts_are_exact_beyond_what_float32_counts(metric: Metric) -> None:
    """An int64 state stays one when rows are left out; weights make it float32 from the beginning."""
    scores, bits, is_real = torch.tensor([0.2, 0.8]), torch.tensor([0, 1]), torch.tensor([True, False])
    metric.update(scores, bits, sample_weight=is_real)
    assert {getattr(metric, name).dtype for name in metric._initial} == {torch.int64}
    metric.set_weighted().update(scores, bits, sample_weight=torch.ones(2))
    assert {getattr(metric, name).dtype for name in metric._initial} == {torch.float32}


class Plain(Metric):
    """Takes no weights."""

    seen: Tensor

    def __init__(self, name: str = "plain") -> None:
        super().__init__(name)
        self.add_state("seen", torch.zeros(()))

    def update(self, prediction: Tensor, target: Tensor) -> None:  # type: ignore[override]
        self.seen = self.seen + len(target)

    def compute(self) -> Tensor:
        return self.seen


def test_each_metric_is_given_the_weights_that_are_meant_for_it() -> None:
    weight, is_real = torch.tensor([2.0, 1.0, 9.0]), torch.tensor([True, True, False])
    prediction, target = torch.tensor([1.0, 2.0, 5.0]), torch.zeros(3)

    def means(*given: Tensor | None) -> tuple[float, float]:
        unweighted, weighted = MeanMetric(absolute_error, "a"), MeanMetric(absolute_error, "b").set_weighted()
        update_metrics([unweighted, weighted], prediction, target, *given)
        return float(unweighted.compute()), float(weighted.compute())

    assert means() == (pytest.approx(8 / 3), pytest.approx(8 / 3))
    assert means(weight) == (pytest.approx(8 / 3), pytest.approx((2 + 2 + 45) / 12))
    assert means(None, is_real) == (1.5, 1.5)
    assert means(weight, is_real) == (1.5, pytest.approx(4 / 3))
    assert means(weight.reshape(3, 1)[:, 0], is_real) == (1.5, pytest.approx(4 / 3))


def test_a_metric_that_takes_no_weights() -> None:
    plain = Plain()
    update_metrics([plain], torch.zeros(3), torch.zeros(3), torch.ones(3))
    assert plain.compute() == 3
    with pytest.raises(TypeError, match="'plain' cannot leave out the rows that pad a short batch"):
        update_metrics([plain], torch.zeros(3), torch.zeros(3), None, torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match="'plain' cannot be one of weighted_metrics: its update takes no sample_weight"):
        plain.set_weighted()


def test_one_number_a_batch_cannot_be_weighed() -> None:
    metric = MeanMetric(lambda prediction, target: (prediction - target).mean(), "bias")
    with pytest.raises(ValueError, match=r"'bias' returns one number for a whole batch.*shape \(rows,\)"):
        metric.update(torch.ones(3), torch.ones(3), sample_weight=torch.ones(3))


def test_a_mean_of_a_number_of_examples_on_the_device() -> None:
    mean = Mean("loss")
    mean.update(torch.tensor(2.0), torch.tensor(3))
    mean.update(torch.tensor(6.0), 1)
    assert (mean.compute(), mean.weight.dtype) == (3.0, torch.int64)


@pytest.mark.parametrize("name", CASES)
def test_another_goes_on_from_its_state(name: str) -> None:
    make, prediction, target = CASES[name]
    first, second = make(), make()
    before = first.state_dict()
    first.update(prediction[:20], target[:20])
    second.load_state_dict(first.state_dict())
    second.update(prediction[20:], target[20:])
    assert float(second.compute()) == pytest.approx(value(make(), (prediction, target)), abs=1e-5)
    second.load_state_dict(before)
    second.update(prediction, target)
    assert float(second.compute()) == pytest.approx(value(make(), (prediction, target)), abs=1e-5)


def test_a_metric_may_be_reset_and_used_again() -> None:
    for name, (make, prediction, target) in CASES.items():
        metric = make()
        first = value(metric, (prediction, target))
        metric.reset()
        metric.update(prediction, target)
        assert float(metric.compute()) == first, name
