"""Equal lifted numbers are read from one place of a program's inputs, and a program that finds them apart is right."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xlatrainer as xla
from xlatrainer.backend.equal_numbers import EqualNumbers
from xlatrainer.backend.state import state
from xlatrainer.debug import metrics


def compilations() -> int:
    return metrics.counter_value("UncachedCompile") or 0


def test_which_numbers_stand_for_which() -> None:
    equal = EqualNumbers([0.5, 0.1, 0.5, 0.0, 0.0, math.nan, math.nan], [1, 2, 1, 0, 0])
    assert equal.floats.tolist() == [0, 1, 0, 3, 4, 5, 5]  # zeros alone: what differs later may begin as zero
    assert equal.ints.tolist() == [0, 1, 0, 3, 4]
    assert equal.hold([0.7, 0.7, 0.7, 1.0, 2.0, 3.0, 3.0], [5, 5, 5, 6, 7])
    assert not equal.hold([0.7, 0.7, 0.8, 1.0, 2.0, 3.0, 3.0], [5, 5, 5, 6, 7])
    assert not equal.hold([0.0, 0.7, -0.0, 1.0, 2.0, 3.0, 3.0], [5, 5, 5, 6, 7])
    assert not equal.hold([0.7, 0.7, 0.7, 1.0, 2.0, 3.0, 3.0], [5, 5, 6, 6, 7])
    assert EqualNumbers.among([0.5, 0.0, 0.0], [1, 0, 0]) is None


def scaled(x: torch.Tensor, first: float, second: float) -> torch.Tensor:
    return (x * first).exp() + (x.sin() * second)


def test_numbers_that_part_are_told_apart_once() -> None:
    x, on_cpu = torch.arange(6.0, device="xla"), torch.arange(6.0)
    for _ in range(2):  # at first `x` is computed, too
        torch.testing.assert_close(scaled(x, 0.5, 0.5).cpu(), scaled(on_cpu, 0.5, 0.5))
    before = compilations()
    torch.testing.assert_close(scaled(x, 0.25, 0.25).cpu(), scaled(on_cpu, 0.25, 0.25))
    assert compilations() == before
    for first, second in ((0.5, 0.25), (0.1, 0.7), (0.3, 0.3)):
        torch.testing.assert_close(scaled(x, first, second).cpu(), scaled(on_cpu, first, second))
    assert compilations() == before + 1


def test_batch_norms_read_their_momentum_from_one_place() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3))).to("xla")
    model(torch.ones(8, 4).to("xla")).sum().item()
    program = state.compilations[-1].program
    assert program.floats == 3
    assert program.ints == 3
    reads = [line for line in program.lowered().as_text().splitlines() if "stablehlo.slice" in line]
    assert len(reads) == 2  # a momentum, and the 1 that batches are counted with


class Normalized(nn.Module):
    """A linear layer and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def train(device: str, change: Callable[[Any, int], None], groups: bool = False) -> tuple[list[float], list[float]]:
    """Losses of six steps, and of each step how many programs were compiled."""
    torch.manual_seed(0)
    model = nn.Sequential(Normalized(), Normalized()).to(device)
    lists = [{"params": list(module.parameters())} for module in model] if groups else model.parameters()
    optimizer = torch.optim.SGD(lists, lr=0.0 if groups else 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = xla.compile(step) if device == "xla" else step
    losses, compiled = [], []
    for index in range(6):
        change((model, optimizer), index)
        before = compilations()
        x = torch.linspace(-1, 1, 12).reshape(4, 3) + index
        losses.append(run(x.to(device)).item())
        compiled.append(compilations() - before)
    return losses, compiled


def momentum_of_one(subject: Any, index: int) -> None:
    model, _ = subject
    if index == 4:
        model[0].second.momentum = 0.7


def rates_apart(subject: Any, index: int) -> None:
    for number, group in enumerate(subject[1].param_groups):
        group["lr"] = 0.01 * index * (number + 1)


@pytest.mark.parametrize(("change", "groups", "compiled"), [(momentum_of_one, False, 1), (rates_apart, True, 0)])
def test_a_replayed_step_with_numbers_that_part(change: Any, groups: bool, compiled: int) -> None:
    losses, programs = train("xla", change, groups)
    assert losses == pytest.approx(train("cpu", change, groups)[0], rel=1e-4)
    assert sum(programs[2:]) == compiled
