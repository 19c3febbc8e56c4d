"""Precision, recall and F1."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.metrics.checks import split, value
from xlatrainer.metrics.precision_recall import F1, Precision, Recall

GENERATOR = torch.Generator().manual_seed(4)
CLASSES = torch.randint(0, 4, (60,), generator=GENERATOR)
SCORES = torch.randn(60, 6, generator=GENERATOR)  # class 5 is never there, and sometimes predicted
SCORES[:, 4] = -99  # neither there nor predicted
KINDS = (Precision, Recall, F1)


def figures(predicted: Any, truth: Any) -> dict[str, list[float]]:
    """Of each class that is there or predicted, by the definition."""
    found: dict[str, list[float]] = {"precision": [], "recall": [], "f1": []}
    for number in sorted({*predicted, *truth}):
        right = np.sum((predicted == number) & (truth == number))
        precision = right / max(np.sum(predicted == number), 1)
        recall = right / max(np.sum(truth == number), 1)
        found["precision"].append(precision)
        found["recall"].append(recall)
        found["f1"].append(2 * precision * recall / (precision + recall) if right else 0.0)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_over_classes(kind: Any) -> None:
    expected = figures(SCORES.argmax(1).numpy(), CLASSES.numpy())[kind().name]
    assert len(expected) == 5
    assert value(kind(), *split(SCORES, CLASSES)) == pytest.approx(np.mean(expected), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_two_classes(kind: Any) -> None:
    scores, truth = SCORES[:, 0], (CLASSES > 1).long()
    predicted = (scores > 0).long()
    both = figures(predicted.numpy(), truth.numpy())[kind().name]
    two = torch.stack([torch.zeros(60), scores], 1)
    expected = pytest.approx(both[1], abs=1e-6)
    assert value(kind(threshold=0.0), *split(scores, truth)) == expected
    assert value(kind(threshold=0.5), *split(torch.sigmoid(scores)[:, None], truth.float()[:, None])) == expected
    assert value(kind(threshold=0.0), *split(scores[:, None], truth.bool())) == expected
    assert value(kind(), *split(two, truth)) == expected
    assert value(kind(average="macro"), *split(two, truth)) == pytest.approx(np.mean(both), abs=1e-6)


def test_pixels() -> None:
    scores, truth = SCORES.reshape(10, 6, 6).transpose(1, 2), CLASSES.reshape(10, 6)
    assert value(F1(), (scores, truth)) == value(F1(), (scores.transpose(1, 2).reshape(60, 6), CLASSES))


def test_nothing_is_divided_by_zero() -> None:
    for kind in KINDS:
        assert value(kind(threshold=0.0), (torch.tensor([-1.0, -2.0]), torch.tensor([0, 0]))) == 0.0


def test_refusals() -> None:
    with pytest.raises(ValueError, match='average must be "binary", "macro" or None, got "?\'micro'):
        F1(average="micro")
    with pytest.raises(ValueError, match=r"use Recall\(threshold=0.0\) for logits"):
        Recall().update(SCORES[:, 0], CLASSES)
    with pytest.raises(ValueError, match='f1: average="binary" is for two classes, there are 6'):
        F1(average="binary").update(SCORES, CLASSES)
    with pytest.raises(ValueError, match=r"needs scores \(N, C, ...\).*got \(60, 6\) and torch.int64 \(60, 2\)"):
        F1().update(SCORES, torch.zeros(60, 2, dtype=torch.int64))
    metric = F1()
    metric.update(SCORES, CLASSES)
    with pytest.raises(ValueError, match="saw 6 classes before, and 4 now"):
        metric.update(SCORES[:, :4], CLASSES)
