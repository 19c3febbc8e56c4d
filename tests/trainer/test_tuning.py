"""The learning rate and the batch size that are found, and that nothing of the trial is left."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.trainer.helpers import ON_CPU, class_batches, classifier, strategy_on
from xlatrainer.data.random_states import random_states
from xlatrainer.trainer.trainer import Trainer
from xlatrainer.trainer.tuning import LearningRates

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def _state(trainer: Trainer) -> dict[str, Any]:
    parts = {name: copy.deepcopy(part.state_dict()) for name, part in trainer.stateful_parts().items()}
    counters = (trainer.epoch, trainer.step, trainer.num_examples, trainer.stop_training)
    return {
        "model": copy.deepcopy(trainer.model.state_dict()),
        "parts": parts,
        "counters": counters,
        "random": random_states(),
    }


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


@pytest.mark.parametrize(("device", "trained"), [("cpu", False), ("cpu", True), ("xla", True)])
def test_nothing_is_left_of_a_search(device: str, trained: bool) -> None:
    trainer = Trainer(
        classifier(),
        "adam",
        use_ema=True,
        gradient_accumulation_steps=3,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50),
        strategy=strategy_on(device),
    )
    if trained:
        trainer.fit(class_batches(), verbose=0)
        trainer.train_on_batch(class_batches()[0])  # the first one of a group of three
    before = _state(trainer)
    trainer.find_lr(class_batches(), steps=12)
    trainer.find_batch_size(class_batches(), max_batch_size=32, memory=10**9 if device == "xla" else None)
    after = _state(trainer)
    for name in before:
        assert _same(before[name], after[name]), name
    assert trainer.gradient_accumulation_steps == 3
    assert trainer.stepper.accumulation.position == int(trained)
    twin = Trainer(classifier(), SGD, strategy=ON_CPU)
    searched = Trainer(classifier(), SGD, strategy=ON_CPU)
    searched.find_lr(class_batches(), steps=5)
    losses = [each.fit(class_batches(), epochs=2, verbose=0).history["loss"] for each in (twin, searched)]
    assert losses[0] == losses[1]


def test_the_losses_are_those_of_a_loop_by_hand() -> None:
    model = classifier()
    reference = copy.deepcopy(model)
    batches = class_batches(64)
    optimizer = SGD(reference.parameters())
    rates, losses = [1e-4 * 10**n for n in range(6)], []
    for step, rate in enumerate(rates):
        inputs, targets = batches[step % 4]
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(reference(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = Trainer(model, SGD).find_lr(batches, min_lr=1e-4, max_lr=10.0, steps=6, early_stop_threshold=None)
    assert found.rates == pytest.approx(rates)
    assert found.losses == pytest.approx(losses, abs=1e-4)


def test_a_search_suggests_a_rate_that_trains_and_ends_when_the_loss_explodes() -> None:
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.randn(8, 1)
    trainer = Trainer(nn.Linear(8, 1), "sgd", loss="mse", strategy=ON_CPU)
    found = trainer.find_lr(inputs, targets, 32, min_lr=1e-6, max_lr=1e3, steps=100)
    assert found.rates[-1] < 100
    assert found.suggestion is not None
    assert 1e-3 < found.suggestion < 1
    trainer.optimizer.param_groups[0]["lr"] = found.suggestion
    losses = trainer.fit(inputs, targets, 32, epochs=20, verbose=0).history["loss"]
    assert losses[-1] < 0.1 * losses[0]
    assert LearningRates([0.1, 0.2, 0.3], [1.0, 2.0, 3.0], None).suggestion is None


def test_the_ratios_of_groups_are_kept() -> None:
    seen: list[list[float]] = []

    class Watching(Trainer):
        def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
            seen.append([group["lr"] for group in self.optimizer.param_groups])
            return super().train_on_batch(x, y, sample_weight)

    model = classifier()
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[3].parameters(), "lr": 0.1}]
    trainer = Watching(model, torch.optim.SGD(groups), strategy=ON_CPU)
    trainer.find_lr(class_batches(), min_lr=0.01, max_lr=0.04, steps=3)
    assert [pytest.approx(rates) for rates in ([0.01, 0.005], [0.02, 0.01], [0.04, 0.02])] == seen
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.2, 0.1]


def test_a_plot() -> None:
    found = LearningRates([0.1, 0.2, 0.3], [3.0, 2.0, 1.0], 0.2)
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = found.plot()
    assert figure.axes[0].get_xscale() == "log"
    assert len(figure.axes[0].lines) == 3
    pyplot.close(figure)


def test_a_batch_size_by_the_account_of_the_program() -> None:
    """What is returned fits, and twice as many rows do not."""
    trainer = Trainer(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3)), SGD)
    batches = class_batches(32)
    memory = 600_000
    rows = trainer.find_batch_size(batches, memory=memory, margin=0.0)
    needed = []
    for each in (rows, 2 * rows):
        x = torch.randn(each, 8)
        trainer.train_on_batch(x, torch.zeros(each, dtype=torch.long))
        found = trainer.stepper.memory_needed()
        assert found is not None
        needed.append(found)
    assert needed[0] <= memory < needed[1]
    assert trainer.find_batch_size(batches, max_batch_size=48) == 32
    with pytest.raises(ValueError, match="not even a batch of one row fits into 1,000 bytes"):
        trainer.find_batch_size(batches, memory=1000, margin=0.0)


def test_a_batch_size_by_running_out_of_memory() -> None:
    class Small(Trainer):
        def training_step(self, batch: Any) -> Any:
            if len(batch[0]) > 10:
                raise RuntimeError("out of memory: 11 rows")
            return super().training_step(batch)

    assert Small(classifier(), SGD, strategy=ON_CPU).find_batch_size(class_batches()) == 8
    assert Trainer(classifier(), SGD, strategy=ON_CPU).find_batch_size(class_batches(), max_batch_size=20) == 16


def test_wrong_arguments() -> None:
    trainer = Trainer(classifier(), SGD, strategy=ON_CPU)
    with pytest.raises(ValueError, match="min_lr must be above 0 and below max_lr"):
        trainer.find_lr(class_batches(), min_lr=1.0, max_lr=0.1)
    with pytest.raises(ValueError, match="steps at least 3"):
        trainer.find_lr(class_batches(), steps=2)
    with pytest.warns(UserWarning, match="ran out"), pytest.raises(ValueError, match="the data has ended"):
        trainer.find_lr(iter(class_batches(32)))
    with pytest.raises(ValueError, match="max_batch_size must be at least 1"):
        trainer.find_batch_size(class_batches(), max_batch_size=0)
