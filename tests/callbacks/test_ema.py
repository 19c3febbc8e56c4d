"""The averages are those of a loop by hand, validations see them, and the model gets them in the end."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.callbacks.helpers import counts, since, small_trainer
from tests.trainer.helpers import DEVICES, class_batches, classifier
from xlatrainer.callbacks.ema import EMA
from xlatrainer.trainer.trainer import Trainer

MOMENTUM = 0.9


def averages_by_hand(epochs: int) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(epochs):
        for inputs, targets in class_batches(rows=64):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            for name, parameter in model.named_parameters():
                averages[name] = MOMENTUM * averages[name] + (1 - MOMENTUM) * parameter.detach()
    return averages, model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("copy_at_end", [True, False])
def test_the_averages(device: str, copy_at_end: bool) -> None:
    trainer = small_trainer(device, learning_rate=0.1)
    trainer.fit(class_batches(rows=64), epochs=3, callbacks=[EMA(MOMENTUM, copy_at_end)], verbose=0)
    averages, model = averages_by_hand(3)
    assert trainer.ema is not None
    for name, parameter in trainer.model.named_parameters():
        expected = averages[name] if copy_at_end else model.get_parameter(name).detach()
        torch.testing.assert_close(trainer.ema.averages[name].detach().cpu(), averages[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parameter.detach().cpu(), expected, rtol=1e-5, atol=1e-6)


def test_the_validation_works_with_them_and_nothing_more_is_run() -> None:
    batches: Any = {"x": class_batches(rows=64), "validation_data": class_batches(rows=32, seed=7), "verbose": 0}
    trainer = small_trainer("xla", learning_rate=0.1)
    trainer.fit(**batches, epochs=1, callbacks=[EMA(MOMENTUM)])
    expected = Trainer(classifier(), "sgd", learning_rate=0.1, use_ema=True, ema_momentum=MOMENTUM)
    history = expected.fit(**batches, epochs=1)
    assert trainer.evaluate(batches["validation_data"], verbose=0)["loss"] == history.history["val_loss"][0]
    before = counts()
    trainer.fit(**batches, epochs=1, callbacks=[EMA(MOMENTUM, copy_at_end=False)])
    found = since(before)
    assert (found["Execute"], found["UncachedCompile"]) == (4 + 2, 0)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="momentum must be at least 0 and below 1, got 1"):
        EMA(1)
    trainer = Trainer(classifier(), "sgd", use_ema=True, ema_momentum=0.5)
    with pytest.raises(ValueError, match=r"averages with a momentum of 0.5, 0.9 was asked for"):
        trainer.fit(class_batches(rows=16), callbacks=[EMA(0.9)], verbose=0)
