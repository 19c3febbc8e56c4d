"""Losses by name, function and module, and the choice when none is given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainer.helpers import ON_CPU, class_batches, classifier
from xlatrainer.trainer.losses import LOSSES, binary_threshold, checked_loss, default_loss, resolve_loss
from xlatrainer.trainer.trainer import Trainer
from xlatrainer.trainer.weighting import EVEN

SCORES, CLASSES = torch.randn(6, 3), torch.tensor([0, 2, 1, 1, 0, 2])
VALUES, REALS = torch.rand(6, 2), torch.rand(6, 2)


@pytest.mark.parametrize(
    ("name", "prediction", "target", "function"),
    [
        ("cross_entropy", SCORES, CLASSES, F.cross_entropy),
        ("cross_entropy", SCORES, CLASSES.int(), lambda p, t: F.cross_entropy(p, t.long())),
        ("cross_entropy", SCORES, SCORES.softmax(1), F.cross_entropy),
        ("NLL", SCORES, CLASSES, F.nll_loss),
        ("mse", VALUES, REALS, F.mse_loss),
        ("mae", VALUES, REALS, F.l1_loss),
        ("huber", VALUES, REALS, F.huber_loss),
        ("smooth_l1", VALUES, REALS, F.smooth_l1_loss),
        ("bce", VALUES, REALS, F.binary_cross_entropy),
        ("bce_with_logits", VALUES, REALS, F.binary_cross_entropy_with_logits),
    ],
)
def test_by_name(name: str, prediction: Tensor, target: Tensor, function: Any) -> None:
    assert torch.equal(resolve_loss(name)(prediction, target), function(prediction, target))


def test_every_name_was_compared() -> None:
    assert set(LOSSES) == {
        "cross_entropy", "nll", "mse", "mae", "huber", "smooth_l1", "bce", "bce_with_logits",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "smooth_l1", "bce", "bce_with_logits"])
def test_shapes_that_would_be_broadcast_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"same shape, got \(6, 1\) and \(6,\)"):
        resolve_loss(name)(torch.rand(6, 1), torch.rand(6))


def test_functions_and_modules_get_the_logits() -> None:
    output = SimpleNamespace(logits=SCORES)
    expected = F.cross_entropy(SCORES, CLASSES)
    assert torch.equal(resolve_loss(F.cross_entropy)(output, CLASSES), expected)
    assert torch.equal(resolve_loss(nn.CrossEntropyLoss())(output, CLASSES), expected)


def test_the_default() -> None:
    own = torch.tensor(3.0)
    assert default_loss(SimpleNamespace(loss=own, logits=SCORES), CLASSES) is own
    assert torch.equal(default_loss(SCORES, CLASSES), F.cross_entropy(SCORES, CLASSES))
    images, pixels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    assert torch.equal(default_loss(images, pixels.int()), F.cross_entropy(images, pixels))
    assert torch.equal(default_loss(SimpleNamespace(logits=VALUES), REALS), F.mse_loss(VALUES, REALS))


@pytest.mark.parametrize(
    ("output", "target", "came"),
    [
        (
            torch.rand(6, 1),
            torch.rand(6),
            r"float32 of shape \(6, 1\), the targets are float32 of shape \(6,\)",
        ),
        (torch.rand(6, 1), CLASSES, r"float32 of shape \(6, 1\), the targets are int64 of shape \(6,\)"),
        (torch.rand(6), CLASSES, r"targets are int64"),
        (torch.rand(6, 2), torch.ones(6, 2, dtype=torch.bool), r"targets are bool"),
        ((SCORES, SCORES), CLASSES, r"returned a tuple"),
        (SCORES, None, r"targets are none"),
    ],
)
def test_where_no_default_fits_the_message_says_what_came(output: Any, target: Any, came: str) -> None:
    with pytest.raises(ValueError, match=rf"{came}.*Chosen by itself: an output with .loss.*one of \['bce'"):
        default_loss(output, target)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unknown loss 'mean'"):
        resolve_loss("mean")
    with pytest.raises(TypeError, match=r"create one, CrossEntropyLoss\(\)"):
        resolve_loss(nn.CrossEntropyLoss)
    with pytest.raises(ValueError, match="Linear has parameters, which the optimizer would not train"):
        resolve_loss(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="loss must be one of"):
        resolve_loss(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must have shape \(\), got \(6,\); use reduction='mean'"):
        checked_loss(torch.rand(6))
    with pytest.raises(TypeError, match="float tensor"):
        checked_loss(1.0)


def test_a_loss_with_buffers_moves_to_the_device() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    trainer = Trainer(classifier(), "sgd", loss=loss, strategy=ON_CPU)
    assert loss.weight.device.type == trainer.strategy.device.type
    trainer.fit(class_batches(), verbose=0)


@pytest.mark.parametrize(
    ("loss", "threshold"),
    [
        ("bce_with_logits", 0.0),
        (nn.BCEWithLogitsLoss(), 0.0),
        (F.binary_cross_entropy_with_logits, 0.0),
        ("BCE", 0.5),
        (nn.BCELoss(), 0.5),
        (F.binary_cross_entropy, 0.5),
        ("mse", None),
        (None, None),
        (nn.CrossEntropyLoss(), None),
    ],
)
def test_the_threshold_of_accuracy_comes_from_the_loss(loss: Any, threshold: float | None) -> None:
    assert binary_threshold(loss) == threshold


def test_accuracy_of_a_binary_model() -> None:
    inputs = torch.randn(50, 1)
    targets = (inputs > 0).float()
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    trainer = Trainer(model, loss="bce_with_logits", metrics=["accuracy"], strategy=ON_CPU)
    assert trainer.evaluate([(inputs, targets)], verbose=0)["accuracy"] == 1.0
    undecided = Trainer(model, loss="mse", metrics=["accuracy"], strategy=ON_CPU)
    with pytest.raises(ValueError, match=r"Accuracy\(threshold=0.0\) for logits"):
        undecided.evaluate([(inputs, targets)], verbose=0)


@pytest.mark.parametrize(
    ("loss", "name"), [("mse", "mse_loss"), ("cross_entropy", "cross_entropy"), (nn.L1Loss(), "L1Loss")]
)
def test_a_batch_without_targets(loss: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"the loss '{name}' needs targets and the batch has none: pass y"):
        resolve_loss(loss)(torch.ones(2, 3), None, EVEN)
    assert resolve_loss(lambda prediction, target: prediction.sum())(torch.ones(2, 3), None, EVEN) == 6
