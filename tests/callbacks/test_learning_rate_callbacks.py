"""A schedule by epoch gives the losses of a loop written by hand; the learning rates are in the logs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.callbacks.helpers import counts, since, small_trainer
from tests.trainer.helpers import DEVICES, class_batches, classifier
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.learning_rate_monitor import LearningRateMonitor
from xlatrainer.callbacks.learning_rate_scheduler import LearningRateScheduler
from xlatrainer.trainer.trainer import Trainer


def decay(epoch: int, lr: float) -> float:
    return lr * 0.5 if epoch else 0.2


def losses_by_hand(epochs: int) -> tuple[list[float], list[float]]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.9)
    losses, rates = [], []
    for epoch in range(epochs):
        rates.append(decay(epoch, optimizer.param_groups[0]["lr"]))
        optimizer.param_groups[0]["lr"] = rates[-1]
        total = 0.0
        for inputs, targets in class_batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(targets)
        losses.append(total / 100)
    return losses, rates


@pytest.mark.parametrize("device", DEVICES)
def test_the_losses_are_those_of_a_loop_by_hand(device: str) -> None:
    trainer = small_trainer(device, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=9.0, momentum=0.9))
    before = counts()
    history = trainer.fit(class_batches(), epochs=4, callbacks=[LearningRateScheduler(decay)], verbose=0)
    losses, rates = losses_by_hand(4)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-5)
    assert history.history["learning_rate"] == pytest.approx(rates)
    if device == "xla":
        assert since(before)["UncachedCompile"] <= 3  # full and short batch, and at most the optimizer's state


def test_schedules_of_the_epoch_alone_and_wrong_ones(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = small_trainer()
    schedule = LearningRateScheduler(lambda epoch: [0.5, 0.25][epoch], verbose=1)
    history = trainer.fit(class_batches(rows=16), epochs=2, callbacks=[schedule], verbose=0)
    assert history.history["learning_rate"] == [0.5, 0.25]
    assert capsys.readouterr().out == "Epoch 1: learning rate 0.5\nEpoch 2: learning rate 0.25\n"
    with pytest.raises(TypeError, match="schedule must be a function"):
        LearningRateScheduler(0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must return a finite number, got nan for epoch 0"):
        trainer.fit(class_batches(rows=16), callbacks=[LearningRateScheduler(lambda epoch: float("nan"))], verbose=0)


def test_the_monitor_and_its_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 3))
    groups = [{"params": model[0].parameters(), "lr": 0.4}, {"params": model[1].parameters(), "lr": 0.02}]
    seen: list[Any] = []
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["learning_rate"]))
    history = Trainer(model, torch.optim.SGD(groups)).fit(
        class_batches(rows=32), callbacks=[LearningRateMonitor(), look], verbose=0
    )
    assert history.history["learning_rate"] == [0.4]
    assert history.history["learning_rate_1"] == [0.02]
    assert seen == [0.4, 0.4]
