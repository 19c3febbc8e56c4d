"""Accumulated and clipped gradients against a loop by hand, and what they cost in programs."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.helpers import ON_CPU, Batches, class_batches, strategy_on
from tests.trainer.test_fit_counts import counted
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.trainer.clipping import Clipping
from xlatrainer.trainer.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


def plain(width: int = 16) -> nn.Module:
    """(N, 8) to (N, 3) without a batch norm, whose statistics are those of the micro-batch; one layer is not used."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
    model[0].register_parameter("unused", nn.Parameter(torch.ones(2)))
    return model


def by_hand(
    model: nn.Module,
    make_optimizer: Any,
    groups: Batches,
    epochs: int,
    clip: Callable[[list[nn.Parameter]], Any] = lambda parameters: None,
) -> tuple[nn.Module, list[float]]:
    """Trained with one update for each of `groups`: a copy of the model, and the loss of each epoch."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for _ in range(epochs):
        total, rows = 0.0, 0
        for inputs, targets in groups:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            clip([p for p in model.parameters() if p.grad is not None])
            optimizer.step()
            total += loss.item() * len(targets)
            rows += len(targets)
        losses.append(total / rows)
    return model, losses


def assert_same_weights(model: nn.Module, reference: nn.Module) -> None:
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("device", "make_optimizer", "rows", "batch_size", "steps"),
    [
        *(
            ("cpu", make, *sizes)
            for make in (SGD, ADAM)
            for sizes in ((96, 16, 2), (100, 8, 3), (90, 20, 4), (40, 16, 5))
        ),
        ("xla", SGD, 100, 8, 3),
        ("xla", ADAM, 40, 16, 5),
    ],
)
def test_micro_batches_equal_one_big_batch(
    device: str, make_optimizer: Any, rows: int, batch_size: int, steps: int
) -> None:
    """With short last batches, last groups that are cut short, and one group larger than the epoch."""
    model = plain()
    reference, expected = by_hand(model, make_optimizer, class_batches(rows, batch_size * steps), epochs=3)
    trainer = Trainer(
        model, make_optimizer, metrics=["accuracy"], gradient_accumulation_steps=steps, strategy=strategy_on(device)
    )
    history = trainer.fit(class_batches(rows, batch_size), epochs=3, verbose=0)
    assert_same_weights(model, reference)
    assert trainer.step == 3 * -(-rows // (batch_size * steps))
    assert trainer.num_examples == 3 * rows
    assert history.history["loss"] == pytest.approx(expected, abs=1e-5)


def _clip_each(parameters: list[nn.Parameter], largest: float) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        norm = parameter.grad.norm()
        if norm > largest:
            parameter.grad *= largest / norm


CLIPS: dict[str, tuple[float, Callable[..., Any]]] = {
    "global_clipnorm": (0.2, nn.utils.clip_grad_norm_),
    "clipnorm": (0.1, _clip_each),
    "clipvalue": (0.02, nn.utils.clip_grad_value_),
}


@pytest.mark.parametrize(
    ("device", "name", "steps"),
    [*(("cpu", name, steps) for name in CLIPS for steps in (1, 2)), *(("xla", name, 1) for name in CLIPS)],
)
def test_clipping_equals_a_loop_by_hand(device: str, name: str, steps: int) -> None:
    largest, clip = CLIPS[name]
    model, norms = plain(), []

    def clip_by_hand(parameters: list[nn.Parameter]) -> None:
        norms.append(clip(parameters, largest))

    reference, _ = by_hand(model, SGD, class_batches(96, 16 * steps), epochs=2, clip=clip_by_hand)
    unclipped, _ = by_hand(model, SGD, class_batches(96, 16 * steps), epochs=2)
    assert not torch.allclose(reference[0].weight, unclipped[0].weight, atol=1e-3)
    settings: dict[str, Any] = {name: largest}
    trainer = Trainer(model, SGD, accumulate_grad_batches=steps, strategy=strategy_on(device), **settings)
    history = trainer.fit(class_batches(96, 16), epochs=2, verbose=0)
    assert_same_weights(model, reference)
    assert ("grad_norm" in history.history) == (name == "global_clipnorm")
    if name == "global_clipnorm":
        half = len(norms) // 2
        expected = [float(torch.stack(part).mean()) for part in (norms[:half], norms[half:])]
        assert history.history["grad_norm"] == pytest.approx(expected, abs=1e-5)


def test_hooks_are_called_for_each_micro_batch_and_a_stop_applies_what_is_there() -> None:
    seen: list[tuple[int, int]] = []

    class Stop(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            seen.append((batch, self.trainer.step))
            if batch == 3:
                self.trainer.stop()

    trainer = Trainer(plain(), SGD, gradient_accumulation_steps=3, callbacks=[Stop()], strategy=ON_CPU)
    trainer.fit(class_batches(96, 16), epochs=2, verbose=0)
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert trainer.step == 2


def test_max_steps_counts_updates() -> None:
    trainer = Trainer(plain(), SGD, gradient_accumulation_steps=2, steps_per_execution=4, strategy=ON_CPU)
    history = trainer.fit(class_batches(96, 16), epochs=9, max_steps=5, verbose=0)
    assert (trainer.step, trainer.epoch, len(history.epoch)) == (5, 2, 2)
    assert trainer.num_examples == 10 * 16
    assert trainer.fit(class_batches(96, 16), max_steps=5, verbose=0).epoch == []


def test_a_group_goes_on_from_its_saved_state() -> None:
    batches = class_batches(64, 16)
    whole = Trainer(plain(), ADAM, gradient_accumulation_steps=4, strategy=ON_CPU)
    whole.fit(batches, verbose=0)
    first, second = (Trainer(plain(), ADAM, gradient_accumulation_steps=4, strategy=ON_CPU) for _ in range(2))
    for batch in batches[:3]:
        first.train_on_batch(batch)
    second.stateful_parts()["accumulation"].load_state_dict(first.stateful_parts()["accumulation"].state_dict())
    second.train_on_batch(batches[3])
    assert (first.step, second.step) == (0, 1)
    assert_same_weights(second.model, whole.model)
    with pytest.raises(ValueError, match="may only change between updates"):
        first.gradient_accumulation_steps = 2


def test_accumulation_and_clipping_are_two_programs_however_many_batches_make_a_group() -> None:
    compiled = []
    for width, steps in ((61, 2), (62, 6)):
        trainer = Trainer(plain(width), ADAM, gradient_accumulation_steps=steps, global_clipnorm=0.5)
        with counted() as counts:
            trainer.fit(class_batches(16 * 24, 16), verbose=0)
        assert counts.fallbacks == []
        assert counts["Execute"] == 24
        compiled.append(counts["UncachedCompile"])
        with counted() as again:
            trainer.fit(class_batches(16 * 24, 16), epochs=2, verbose=0)
        assert (again["Execute"], again["UncachedCompile"], again["Replay"]) == (48, 0, 48)
        assert again["TransferFromDevice"] == 2 * 2  # loss and norm, at the end of each epoch
    assert compiled == [2, 2]
    with counted() as cut_short:
        trainer.fit(class_batches(16 * (steps + 1), 16), epochs=2, verbose=0)
    assert (cut_short["Execute"], cut_short["UncachedCompile"]) == (2 * (steps + 2), 1)


def test_accumulation_with_several_steps_in_one_program() -> None:
    model = plain()
    reference, _ = by_hand(model, ADAM, class_batches(160, 64), epochs=3)
    trainer = Trainer(model, ADAM, gradient_accumulation_steps=4, steps_per_execution=8)
    trainer.fit(class_batches(160, 16), epochs=3, verbose=0)
    assert_same_weights(model, reference)


def test_a_schedule_of_accumulation() -> None:
    model = plain()
    groups = [class_batches(96, 16), class_batches(96, 32)]
    reference = copy.deepcopy(model)
    optimizer = SGD(reference.parameters())
    for epoch in groups:
        for inputs, targets in epoch:
            optimizer.zero_grad()
            F.cross_entropy(reference(inputs), targets).backward()
            optimizer.step()
    trainer = Trainer(model, SGD)

    def schedule(epoch: int, logs: Any) -> None:
        trainer.gradient_accumulation_steps = epoch + 1

    trainer.fit(class_batches(96, 16), epochs=2, callbacks=[LambdaCallback(on_epoch_begin=schedule)], verbose=0)
    assert_same_weights(model, reference)


def test_a_group_of_parameters_that_is_added_later_is_accumulated_too() -> None:
    model = plain()
    reference, expected = by_hand(model, SGD, class_batches(96, 32), epochs=2)
    trainer = Trainer(model, SGD([model[0].weight]), gradient_accumulation_steps=2, strategy=ON_CPU)
    trainer.optimizer.add_param_group({"params": [p for p in model.parameters() if p is not model[0].weight]})
    assert trainer.fit(class_batches(96, 16), epochs=2, verbose=0).history["loss"] == pytest.approx(expected, abs=1e-5)
    assert_same_weights(model, reference)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_accumulation_steps": 0}, "must be at least 1, got 0"),
        ({"gradient_accumulation_steps": 2, "accumulate_grad_batches": 2}, "names of the same argument"),
        ({"clipnorm": 1.0, "clipvalue": 1.0}, "only one of global_clipnorm, clipnorm and clipvalue"),
        ({"clipvalue": 0.0}, "clipvalue must be above 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(plain(), strategy=ON_CPU, **arguments)


def test_a_gradient_of_zero_stays_zero() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    for clipping in (Clipping(global_clipnorm=1.0), Clipping(clipnorm=1.0), Clipping(clipvalue=1.0)):
        clipping.apply([parameter])
        assert torch.equal(parameter.grad, torch.zeros(3))
