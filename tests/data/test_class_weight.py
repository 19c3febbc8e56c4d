"""Weights of classes as sample weights."""

from typing import Any

import numpy as np
import pytest
import torch

from xlatrainer.data.batch import split_batch
from xlatrainer.data.class_weight import ClassWeight

X = torch.zeros(4, 3)
CLASSES = torch.tensor([0, 2, 1, 7])
WEIGHTS = {0: 0.5, 2: 3.0}
EXPECTED = [0.5, 3.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "targets",
    [
        CLASSES,
        CLASSES.numpy(),
        CLASSES.to(torch.uint8),
        CLASSES.reshape(4, 1),
        CLASSES.float(),
        torch.nn.functional.one_hot(CLASSES).float(),
    ],
    ids=["long", "array", "small", "column", "float", "one-hot"],
)
def test_a_weight_for_each_row(targets: Any) -> None:
    weighed = ClassWeight(WEIGHTS)((X, targets))
    assert weighed.sample_weight.tolist() == EXPECTED
    assert (weighed.inputs is X, weighed.targets is targets) == (True, True)


def test_they_multiply_sample_weights() -> None:
    own = torch.tensor([2.0, 2.0, 3.0, 0.0])
    expected = [1.0, 6.0, 3.0, 0.0]
    assert ClassWeight(WEIGHTS)([X, CLASSES, own])[2].tolist() == expected
    for key in ("labels", "label", "target"):
        weighed = ClassWeight({np.int64(0): 0.5, 2: 3})({"x": X, key: CLASSES, "sample_weight": own.numpy()})
        assert list(weighed) == ["x", key, "sample_weight"]
        assert split_batch(weighed).sample_weight.tolist() == expected


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(4, 5, dtype=torch.int64), r"one-hot and float; got \(4, 5\) of torch.int64"),
        (None, "the targets are none"),
        ({"a": CLASSES}, "the targets are a dict"),
    ],
)
def test_targets_that_are_no_class_a_row(targets: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ClassWeight(WEIGHTS)((X, targets))


@pytest.mark.parametrize(
    ("weights", "error"),
    [([1.0, 2.0], TypeError), ({"a": 1.0}, TypeError), ({-1: 1.0}, ValueError), ({0: -1.0}, ValueError)],
)
def test_wrong_weights(weights: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="class"):
        ClassWeight(weights)
