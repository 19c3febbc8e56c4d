"""The updates of each epoch are those of a loop by hand with as many batches for one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.callbacks.helpers import small_trainer
from tests.trainer.helpers import DEVICES, class_batches, classifier
from xlatrainer.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from xlatrainer.callbacks.lambda_callback import LambdaCallback

SCHEDULE = {1: 3, 3: 2}
EXPECTED = [1, 3, 3, 2]  # batches for an update, in each epoch


def losses_by_hand() -> list[float]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in EXPECTED:
        batches = class_batches(rows=96)
        total = 0.0
        for start in range(0, len(batches), number):
            group = batches[start : start + number]
            optimizer.zero_grad()
            for inputs, targets in group:
                loss = F.cross_entropy(model(inputs), targets)
                (loss / len(group)).backward()
                total += loss.item()
            optimizer.step()
        losses.append(total / len(batches))
    return losses


@pytest.mark.parametrize("device", DEVICES)
def test_the_losses_and_updates(device: str) -> None:
    trainer = small_trainer(device, learning_rate=0.1)
    updates: list[Any] = []
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: updates.append(trainer.step))
    history = trainer.fit(
        class_batches(rows=96), epochs=4, callbacks=[GradientAccumulationScheduler(SCHEDULE), note], verbose=0
    )
    assert updates == [6, 8, 10, 13]
    assert history.history["loss"] == pytest.approx(losses_by_hand(), rel=1e-5)
    assert trainer.gradient_accumulation_steps == 1


@pytest.mark.parametrize("wrong", [{}, {-1: 2}, {0: 0}])
def test_refusals(wrong: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="scheduling maps epochs, from 0, to numbers of batches"):
        GradientAccumulationScheduler(wrong)
