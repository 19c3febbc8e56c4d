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


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_that_was_interrupted_is_applied_by_the_next_fit(device: str) -> None:
    def fail(batch: int, logs: Any) -> None:
        if batch == 4:
            raise OSError("no space left")

    trainer = small_trainer(device, learning_rate=0.1)
    scheduler = GradientAccumulationScheduler({0: 3})
    with pytest.raises(OSError, match="no space left"):
        trainer.fit(class_batches(rows=96), callbacks=[scheduler, LambdaCallback(on_train_batch_end=fail)], verbose=0)
    assert (trainer.step, trainer.gradient_accumulation_steps) == (1, 3)
    trainer.fit(class_batches(rows=48), callbacks=[scheduler], verbose=0)
    assert (trainer.step, trainer.gradient_accumulation_steps) == (3, 1)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = class_batches(rows=96)
    for group in (batches[:3], batches[3:5], class_batches(rows=48)):
        optimizer.zero_grad()
        for inputs, targets in group:
            (F.cross_entropy(model(inputs), targets) / len(group)).backward()
        optimizer.step()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value.cpu(), model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [{}, {-1: 2}, {0: 0}])
def test_refusals(wrong: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="scheduling maps epochs, from 0, to numbers of batches"):
        GradientAccumulationScheduler(wrong)
