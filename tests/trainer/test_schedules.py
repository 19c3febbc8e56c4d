"""Learning-rate schedules against a loop by hand; they compile nothing and do not end replay."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from tests.trainer.helpers import ON_CPU, class_batches, strategy_on
from tests.trainer.test_fit_counts import counted
from tests.trainer.test_updates import assert_same_weights, plain
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.trainer.schedules import WarmupCosineLR
from xlatrainer.trainer.trainer import Trainer

STEPS = 6  # an epoch

BY_STEP: dict[str, Any] = {
    "one_cycle": partial(OneCycleLR, max_lr=0.1, total_steps=4 * STEPS),
    "warmup_cosine": partial(WarmupCosineLR, warmup_steps=3, total_steps=2 * STEPS),
}
BY_EPOCH: dict[str, Any] = {
    "step": partial(StepLR, step_size=1, gamma=0.5),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda n: 0.1 * n), CosineAnnealingLR(optimizer, 5)], milestones=[2]
    ),
}


def by_hand(model: nn.Module, make_optimizer: Any, make: Any, by_step: bool, epochs: int) -> tuple[nn.Module, Any]:
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    scheduler, rates = make(optimizer), []
    for _ in range(epochs):
        for inputs, targets in class_batches(16 * STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            if by_step:
                scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        if not by_step:
            scheduler.step()
    return model, rates


@pytest.mark.parametrize(
    ("device", "name"),
    [*(("cpu", name) for name in [*BY_STEP, *BY_EPOCH]), ("xla", "one_cycle"), ("xla", "sequential")],
)
def test_a_schedule_equals_a_loop_by_hand(device: str, name: str) -> None:
    make = BY_STEP.get(name) or BY_EPOCH[name]
    make_optimizer = partial(torch.optim.Adam, lr=0.02)  # whose betas OneCycleLR changes too
    model = plain()
    reference, rates = by_hand(model, make_optimizer, make, name in BY_STEP, epochs=4)
    trainer = Trainer(model, make_optimizer, scheduler=make, strategy=strategy_on(device))
    history = trainer.fit(class_batches(16 * STEPS), epochs=4, verbose=0).history
    assert history["learning_rate"] == pytest.approx(rates)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("name", ["one_cycle"])
def test_several_steps_in_one_program_have_each_its_own_learning_rate(name: str) -> None:
    make_optimizer = partial(torch.optim.Adam, lr=0.02)
    model = plain(81)
    reference, rates = by_hand(model, make_optimizer, BY_STEP[name], True, epochs=4)
    trainer = Trainer(model, make_optimizer, scheduler=BY_STEP[name], steps_per_execution=3)
    with counted() as counts:
        history = trainer.fit(class_batches(16 * STEPS), epochs=4, verbose=0).history
    assert history["learning_rate"] == pytest.approx(rates)
    assert_same_weights(model, reference)
    assert counts["Execute"] == 3 + (4 * STEPS - 3) // 3
    assert counts["Replay"] == 4 * STEPS - 3


def test_no_program_and_no_transfer_for_a_schedule() -> None:
    trainer = Trainer(plain(82), "adam", scheduler=BY_STEP["one_cycle"], metrics=["accuracy"])
    batches = class_batches(16 * STEPS)
    trainer.fit(batches, verbose=0)
    with counted() as counts:
        trainer.fit(batches, epochs=2, verbose=0)
    assert (counts["Execute"], counts["UncachedCompile"], counts["Replay"]) == (2 * STEPS, 0, 2 * STEPS)
    assert counts["TransferFromDevice"] == 2 * 2
    assert counts["TransferToDevice"] == 2 * (2 * STEPS + 4)


def test_a_scheduler_object_built_before_the_move_goes_on_working() -> None:
    model = plain()
    optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}], 0.1)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    trainer = Trainer(model, optimizer, scheduler=scheduler, scheduler_interval="step")
    trainer.fit(class_batches(16 * 2), verbose=0)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([0.075, 0.025])
    assert trainer.learning_rate == pytest.approx(0.075)
    assert trainer.stateful_parts()["scheduler"] is scheduler


def test_a_schedule_steps_with_updates_not_with_micro_batches() -> None:
    trainer = Trainer(
        plain(),
        "sgd",
        learning_rate=1.0,
        scheduler=halving,
        scheduler_interval="step",
        gradient_accumulation_steps=4,
        strategy=ON_CPU,
    )
    trainer.fit(class_batches(16 * STEPS), epochs=2, verbose=0)
    assert trainer.step == 4  # of 4 and 2 micro-batches an epoch
    assert trainer.learning_rate == 0.5**4


def halving(optimizer: Any) -> LRScheduler:
    return StepLR(optimizer, 1, gamma=0.5)


def test_a_plateau_looks_at_the_validation() -> None:
    trainer = Trainer(
        plain(),
        "sgd",
        learning_rate=1.0,
        scheduler=partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"),
        strategy=ON_CPU,
    )
    batches = class_batches(32)
    history = trainer.fit(batches, epochs=4, validation_data=batches, validation_freq=2, verbose=0).history
    assert history["learning_rate"] == [1.0, 1.0, 1.0, 1.0]
    assert trainer.learning_rate == 0.5  # the second validation is no better by that threshold
    scheduler = trainer.stateful_parts()["scheduler"]
    trainer.schedules._monitor = "val_accuracy"
    with pytest.raises(ValueError, match="monitor 'val_accuracy', which is not among"):
        trainer.fit(batches, validation_data=batches, verbose=0)
    trainer.schedules._monitor = None
    trainer.fit(batches, epochs=2, verbose=0)  # without validation it looks at the loss
    assert trainer.learning_rate == 0.125
    assert scheduler.factor == 0.5


def test_the_state_of_a_schedule_is_saved() -> None:
    first, second = (Trainer(plain(), "sgd", scheduler=BY_STEP["warmup_cosine"], strategy=ON_CPU) for _ in range(2))
    first.fit(class_batches(16 * STEPS), verbose=0)
    for name, part in second.stateful_parts().items():
        part.load_state_dict(first.stateful_parts()[name].state_dict())
    assert second.learning_rate == first.learning_rate
    rates = []
    for trainer in (first, second):
        trainer.train_on_batch(class_batches()[0])
        rates.append(trainer.learning_rate)
    assert rates[0] == rates[1]


def test_a_warmup_without_warmup_and_with_a_floor() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = WarmupCosineLR(optimizer, 0, 2, min_factor=0.1)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([2.0, 1.1, 0.2, 0.2])
    with pytest.raises(ValueError, match="below total_steps, got 5 and 5"):
        WarmupCosineLR(optimizer, 5, 5)


def test_a_frozen_part_and_settings_of_each_group_are_kept() -> None:
    """Frozen parameters stay as they are, and each group has its own weight decay and learning rate."""
    model = plain()
    model[0].requires_grad_(False)
    reference = copy.deepcopy(model)

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [of[2].weight], "weight_decay": 0.1},
            {"params": [of[2].bias, *of[0].parameters()], "lr": 1.0},
        ]

    optimizer = torch.optim.SGD(groups(reference), lr=0.1)
    for inputs, targets in class_batches() * 2:
        optimizer.zero_grad()
        F.cross_entropy(reference(inputs), targets).backward()
        optimizer.step()
    trainer = Trainer(model, torch.optim.SGD(groups(model), lr=0.1), gradient_accumulation_steps=1, clipvalue=1e9)
    trainer.fit(class_batches(), epochs=2, verbose=0)
    assert_same_weights(model, reference)


def test_a_part_that_is_unfrozen_later_trains_from_then_on() -> None:
    model = plain()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model[0].weight)
    trainer = Trainer(model, "sgd", learning_rate=0.1)
    changed: list[bool] = []

    def unfreeze(epoch: int, logs: Any) -> None:
        changed.append(not torch.equal(model[0].weight.detach().cpu(), before.cpu()))
        model[0].requires_grad_(True)

    trainer.fit(class_batches(96), epochs=3, callbacks=[LambdaCallback(on_epoch_end=unfreeze)], verbose=0)
    assert changed == [False, True, True]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheduler_interval": "batch"}, ValueError, "scheduler_interval must be 'step', 'epoch' or None"),
        ({"scheduler": 3}, TypeError, "scheduler must be a torch.optim.lr_scheduler object"),
        ({"scheduler": lambda optimizer: optimizer}, TypeError, "scheduler must be"),
        ({"scheduler": {"other": halving}}, ValueError, "for the optimizer 'other'"),
        (
            {"scheduler": halving(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))},
            ValueError,
            "belongs to another optimizer",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Trainer(plain(), strategy=ON_CPU, **arguments)


def test_several_optimizers_have_each_their_schedule() -> None:
    model = plain()
    optimizers = {"a": torch.optim.SGD(model[0].parameters(), 1.0), "b": torch.optim.SGD(model[2].parameters(), 1.0)}
    with pytest.raises(ValueError, match="must be a dict by their names"):
        Trainer(model, optimizers, scheduler=halving, strategy=ON_CPU)

    class Both(Trainer):
        def training_step(self, batch: Any) -> None:
            for optimizer in self.optimizers.values():
                self.minimize(F.cross_entropy(self.model(batch[0]), batch[1]), optimizer)

    trainer = Both(model, optimizers, scheduler={"b": halving}, scheduler_interval="step", strategy=ON_CPU)
    trainer.fit(class_batches(32), verbose=0)
    assert [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers.values()] == [1.0, 0.25]
