"""Averages of weights against a loop by hand; evaluation uses them, and they cost no program of their own."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.helpers import ON_CPU, class_batches, classifier, evaluated, strategy_on
from tests.trainer.test_fit_counts import counted
from tests.trainer.test_updates import plain
from xlatrainer.trainer.ema import EMA
from xlatrainer.trainer.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def by_hand(model: nn.Module, momentum: float, batch_size: int, epochs: int) -> tuple[nn.Module, nn.Module]:
    """The model trained by hand, and one with the averages of its parameters (and its own buffers)."""
    model = copy.deepcopy(model)
    averages = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = SGD(model.parameters())
    for _ in range(epochs):
        for inputs, targets in class_batches(100, batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            for name, value in model.named_parameters():
                averages[name] = momentum * averages[name] + (1 - momentum) * value.detach()
    averaged = copy.deepcopy(model)
    averaged.load_state_dict({**model.state_dict(), **averages})
    return model, averaged


@pytest.mark.parametrize(("device", "steps"), [("cpu", 1), ("cpu", 2), ("xla", 1)])
def test_averages_equal_a_loop_by_hand_and_evaluation_uses_them(device: str, steps: int) -> None:
    model = classifier() if steps == 1 else plain()
    reference, averaged = by_hand(model, 0.8, 16 * steps, epochs=2)
    trainer = Trainer(
        model,
        SGD,
        metrics=["accuracy"],
        use_ema=True,
        ema_momentum=0.8,
        gradient_accumulation_steps=steps,
        strategy=strategy_on(device),
    )
    held_out = class_batches(50, seed=3)
    history = trainer.fit(class_batches(), epochs=2, validation_data=held_out, verbose=0).history
    for name, value in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).cpu(), value, atol=1e-5, rtol=1e-5)
    assert trainer.ema is not None
    for name, average in trainer.ema.averages.items():
        torch.testing.assert_close(average.cpu(), averaged.get_parameter(name), atol=1e-5, rtol=1e-5)
    expected = evaluated(averaged, held_out)
    assert history["val_loss"][-1] == pytest.approx(expected["loss"], abs=1e-5)
    assert trainer.evaluate(held_out, verbose=0) == pytest.approx(expected, abs=1e-5)
    x = held_out[0][0]
    with torch.no_grad():
        torch.testing.assert_close(trainer.predict(x, verbose=0), averaged(x), atol=1e-5, rtol=1e-5)
    trainer.ema.copy_to_model()
    torch.testing.assert_close(model.get_parameter("0.weight").cpu(), averaged[0].weight, atol=1e-5, rtol=1e-5)


def test_averages_need_no_program_of_their_own() -> None:
    trainer = Trainer(classifier(width=91), "adam", use_ema=True)
    batches = class_batches(96)
    with counted() as counts:
        trainer.fit(batches, epochs=2, validation_data=batches, verbose=0)
    assert counts.fallbacks == []
    assert counts["Execute"] == 1 + 2 * (6 + 6)  # the averages begin as copies
    assert counts["UncachedCompile"] == 1 + 2  # to copy, to train, to evaluate
    assert counts["Replay"] >= 2 * (6 + 6) - 5
    with counted() as again:
        trainer.fit(batches, epochs=2, validation_data=batches, verbose=0)
    assert (again["Execute"], again["UncachedCompile"], again["Replay"]) == (24, 0, 24)


def test_with_several_steps_in_one_program() -> None:
    model = classifier()
    _, averaged = by_hand(model, 0.99, 16, epochs=3)
    trainer = Trainer(model, SGD, use_ema=True, steps_per_execution=3)
    trainer.fit(class_batches(), epochs=3, verbose=0)
    assert trainer.ema is not None
    torch.testing.assert_close(trainer.ema.averages["0.weight"].cpu(), averaged[0].weight, atol=1e-5, rtol=1e-5)


class Recurrent(nn.Module):
    """Holds its parameters in a list beside, as torch's recurrent layers do, and ties two of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.lstm(x)[0]))


def test_tied_and_recurrent_weights_are_put_in_place_and_back() -> None:
    model = Recurrent()
    ema = EMA(model, 0.5)
    ema.start()
    x = torch.randn(2, 3, 8)
    before, parameters = model(x), dict(model.named_parameters())
    with torch.no_grad():
        for average in ema.averages.values():
            average.add_(0.1)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.add_(0.1)
    with ema.applied():
        assert model.second.weight is model.first.weight is ema.averages["first.weight"]
        torch.testing.assert_close(model(x), expected(x))
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    assert torch.equal(model(x), before)


def test_the_state_is_saved_and_loaded() -> None:
    first, second = (Trainer(classifier(), SGD, use_ema=True, strategy=ON_CPU) for _ in range(2))
    first.fit(class_batches(), verbose=0)
    state = first.stateful_parts()["ema"].state_dict()
    second.stateful_parts()["ema"].load_state_dict(state)
    second.model.load_state_dict(first.model.state_dict())
    second.stateful_parts()["optimizer"].load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for trainer in (first, second):
        trainer.fit(class_batches(), verbose=0)
    again = [trainer.stateful_parts()["ema"].state_dict() for trainer in (first, second)]
    assert again[0].keys() == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert all(torch.equal(again[0][name], again[1][name]) for name in again[0])
    with pytest.raises(ValueError, match=r"'0.weight' of shape \(2,\), which the model does not have"):
        second.stateful_parts()["ema"].load_state_dict({"0.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match="ema_momentum must be at least 0 and below 1, got 1"):
        Trainer(classifier(), use_ema=True, ema_momentum=1.0, strategy=ON_CPU)
