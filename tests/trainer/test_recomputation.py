"""Recomputed activations: the same numbers, dropout too, one program, less memory."""

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.helpers import DEVICES, ON_CPU, strategy_on
from tests.trainer.test_fit_counts import counted
from xlatrainer.trainer.recomputation import recompute_in_backward
from xlatrainer.trainer.trainer import Trainer

ADAM = partial(torch.optim.Adam, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Head(nn.Sequential):
    """A class of its own, to be chosen by."""


def encoder(width: int = 8, dropout: float = 0.3, attention: bool = True) -> nn.Module:
    torch.manual_seed(0)
    first = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=dropout, batch_first=True)
    layers = [
        first if attention else Head(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)),
        Head(nn.Flatten(), nn.Linear(5 * width, 6), nn.BatchNorm1d(6), nn.Dropout(dropout)),
        nn.Linear(6, 3),
    ]
    return nn.Sequential(*layers)


def batches(number: int = 6, width: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 5, width, generator=generator), torch.randint(0, 3, (16,), generator=generator))
        for _ in range(number)
    ]


@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp32"), ("cpu", "bf16-mixed"), ("xla", "fp32")])
def test_the_numbers_stay_the_same(device: str, precision: str) -> None:
    """With dropout, and with a batch norm, whose statistics are taken once."""
    found = []
    kinds: list[list[Any]] = [[], [nn.TransformerEncoderLayer, Head]]
    for classes in kinds:
        model = encoder()
        trainer = Trainer(model, SGD, precision=precision, gradient_checkpointing=classes, strategy=strategy_on(device))
        torch.manual_seed(5)
        losses = trainer.fit(batches(), epochs=2, verbose=0).history["loss"]
        found.append((losses, copy.deepcopy(model.state_dict())))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5 if precision == "fp32" else 1e-3)
    for name, value in found[0][1].items() if precision == "fp32" else ():
        torch.testing.assert_close(found[1][1][name], value, atol=1e-5, rtol=1e-4)


def test_it_is_one_program_and_is_replayed() -> None:
    trainer = Trainer(encoder(12, attention=False), ADAM, gradient_checkpointing=[Head])
    with counted() as counts:
        trainer.fit(batches(width=12), verbose=0)
    assert counts.fallbacks == []
    assert (counts["Execute"], counts["UncachedCompile"]) == (6, 1)
    with counted() as again:
        trainer.fit(batches(width=12), epochs=2, validation_data=batches(width=12), verbose=0)
    assert (again["Execute"], again["UncachedCompile"]) == (24, 1)
    assert again["Replay"] >= 20


class Unusual(nn.Module):
    """Takes and returns more than one tensor, draws numbers in place, and has a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, index: Tensor, *, scale: float) -> Any:
        noise = torch.empty_like(x).uniform_()
        hidden = (x * noise) @ self.weight + torch.rand_like(x) * self.frozen
        return {"hidden": hidden[index], "scale": scale, "twice": (2 * hidden * scale, x.detach())}


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_of_any_form_and_gradients_of_chosen_tensors(device: str) -> None:
    found = []
    for recomputed in (False, True):
        module = Unusual().to(device)
        model = nn.ModuleList([module])
        if recomputed:
            recompute_in_backward(model, [Unusual])
        torch.manual_seed(3)
        x = torch.arange(6.0).reshape(2, 3).to(device).requires_grad_()
        output = module(x, torch.tensor([1, 0], device=device), scale=0.5)
        assert output["scale"] == 0.5
        loss = output["hidden"].square().sum() + output["twice"][0].sum()
        found.append(torch.autograd.grad(loss, [x, module.weight]))
        with torch.no_grad():
            assert module(x, torch.tensor([1, 0], device=device), scale=0.5)["hidden"].shape == (2, 3)
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again.cpu(), plain.cpu())


def test_less_memory_is_needed() -> None:
    """By XLA's own account of the training step's program: a third, of six blocks of four layers."""
    needed = []
    for classes in ([], [Head]):
        torch.manual_seed(0)
        blocks = [Head(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh()))) for _ in range(6)]
        trainer = Trainer(nn.Sequential(*blocks), "sgd", gradient_checkpointing=classes)
        x = torch.randn(2048, 64)
        trainer.train_on_batch(x, x)
        needed.append(trainer.stepper.memory_needed())
    activations = 24 * 2048 * 64 * 4
    assert needed[0] > activations
    assert needed[1] < 0.6 * needed[0]


def test_a_copied_model_recomputes_its_own_and_signatures_stay() -> None:
    module = Head(nn.Linear(2, 2), nn.Tanh())
    signature = inspect.signature(module.forward)
    recompute_in_backward(module, [Head])
    assert inspect.signature(module.forward) == signature
    twin = copy.deepcopy(module)
    twin(torch.ones(1, 2)).sum().backward()
    assert twin[0].weight.grad is not None
    assert module[0].weight.grad is None


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        ([nn.LSTM], ValueError, "the model has no LSTM; it has BatchNorm1d, Dropout"),
        ([nn.Linear(1, 1)], TypeError, "must be a list of module classes"),
        (["Linear"], TypeError, "must be a list of module classes"),
    ],
)
def test_wrong_arguments(classes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Trainer(encoder(), gradient_checkpointing=classes, strategy=ON_CPU)
