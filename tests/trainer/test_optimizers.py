"""Optimizers by name, class, function and instance; an instance keeps its groups and its state."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.helpers import DEVICES, ON_CPU, class_batches, classifier, strategy_on
from xlatrainer.trainer.optimizers import OPTIMIZERS, resolve_optimizer
from xlatrainer.trainer.trainer import Trainer


def losses_of(model: nn.Module, optimizer: Any, epochs: int = 2, **arguments: Any) -> list[float]:
    trainer = Trainer(model, optimizer, strategy=ON_CPU, **arguments)
    return trainer.fit(class_batches(), epochs=epochs, verbose=0).history["loss"]


@pytest.mark.parametrize("name", ["sgd", "Adam", "ADAMW", "rmsprop", "adagrad", "nadam"])
def test_a_name_is_the_class(name: str) -> None:
    assert losses_of(classifier(), name) == losses_of(classifier(), OPTIMIZERS[name.lower()])


def test_every_class_of_torch_that_fits_the_loop_has_a_name() -> None:
    assert {"adadelta", "adafactor", "adamax", "asgd", "radam", "rprop"} <= set(OPTIMIZERS)
    assert not {"optimizer", "lbfgs", "sparseadam"} & set(OPTIMIZERS)


def test_the_default_is_adamw() -> None:
    trainer = Trainer(classifier(), strategy=ON_CPU)
    assert type(trainer.optimizer) is torch.optim.AdamW


def test_learning_rate_is_passed_on() -> None:
    assert losses_of(classifier(), "sgd", learning_rate=0.3) == losses_of(
        classifier(), lambda parameters: torch.optim.SGD(parameters, lr=0.3)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_an_instance_goes_on_with_its_groups_and_state(device: str, kind: type[torch.optim.Optimizer]) -> None:
    """Two epochs by hand on the CPU, then two by the Trainer: the same as four by hand."""
    model = classifier()
    settings = {"momentum": 0.9} if kind is not torch.optim.Adam else {}
    groups = [
        {"params": model[0].parameters(), "lr": 0.01},
        {"params": [*model[1].parameters(), *model[3].parameters()], "weight_decay": 0.1},
    ]
    optimizer = kind(groups, lr=0.005, **settings)
    by_hand(model, optimizer, epochs=2)
    reference = copy.deepcopy((model, optimizer))
    expected = by_hand(*reference, epochs=2)
    trainer = Trainer(model, optimizer, strategy=strategy_on(device))
    assert trainer.optimizer is optimizer
    assert trainer.fit(class_batches(), epochs=2, verbose=0).history["loss"] == pytest.approx(expected, abs=1e-5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005]


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> list[float]:
    losses = []
    for _ in range(epochs):
        total = 0.0
        for inputs, targets in class_batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(targets)
        losses.append(total / 100)
    return losses


def test_a_scheduler_goes_on_with_an_instance() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = Trainer(model, optimizer, strategy=ON_CPU)
    trainer.fit(class_batches(), verbose=0)
    scheduler.step()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = classifier()
    with pytest.raises(ValueError, match=r"holds 5 parameters, 5 of which are not parameters of the model.*\(16, 8\)"):
        Trainer(classifier(), torch.optim.SGD(other.parameters()), strategy=ON_CPU)


@pytest.mark.parametrize("as_instance", [True, False])
def test_lbfgs_is_refused(as_instance: bool) -> None:
    model = classifier()
    optimizer = torch.optim.LBFGS(model.parameters()) if as_instance else torch.optim.LBFGS
    with pytest.raises(ValueError, match="LBFGS evaluates the model several times a step"):
        Trainer(model, optimizer, strategy=ON_CPU)


@pytest.mark.parametrize("spec", [3, lambda parameters: None])
def test_what_is_no_optimizer_is_refused(spec: Any) -> None:
    with pytest.raises(TypeError, match=r"optimizer must be one of \['adadelta'.*a class of torch.optim, a function"):
        resolve_optimizer(spec, [nn.Parameter(torch.ones(1))])


def test_an_optimizer_whose_step_reads_values() -> None:
    """Its steps run with their Python, each of them: nothing foresees what it will read."""
    losses = []
    for device in DEVICES:
        trainer = Trainer(classifier(), "adafactor", strategy=strategy_on(device))
        losses.append(trainer.fit(class_batches(rows=96), epochs=2, verbose=0).history["loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_trains_on_the_device_as_on_the_cpu(name: str) -> None:
    """On matrices, which all of them take; Muon refuses anything else, as a stand-in for a matrix in a replay, too."""
    losses = {}
    for device in DEVICES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
        batches = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(5)]
        trainer = Trainer(model, name, "mse", strategy=strategy_on(device))
        losses[device] = trainer.fit(batches, epochs=2, verbose=0).history["loss"]
    assert losses["xla"] == pytest.approx(losses["cpu"], rel=1e-4)
