"""Eager mode, and `compile` as decorator, call and block, with its limits."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xlatrainer as xla
from xlatrainer import config, debug
from xlatrainer.backend import counters
from xlatrainer.errors import GraphBreakError, GraphLimitError


@pytest.fixture(autouse=True)
def _lazy_again() -> Iterator[None]:
    yield
    xla.eager_mode(False)


class Executions:
    """How many programs have run since it was made, or asked last."""

    def __init__(self) -> None:
        self._before = counters.value("Execute")

    def __call__(self) -> int:
        before, self._before = self._before, counters.value("Execute")
        return self._before - before


def test_every_operator_runs_at_once() -> None:
    x = torch.ones(3, 3).to("xla")
    xla.sync()
    debug.clear_metrics()
    executions = Executions()
    assert not xla.is_eager_mode()
    xla.eager_mode(True)
    assert xla.is_eager_mode()
    y = x @ x
    assert executions() == 1
    y += 1
    assert executions() == 1
    y[0].mul_(2)
    assert executions() == 1
    xla.sync()
    assert executions() == 0
    samples = debug.metric_data("EagerOpExecuteTime")
    assert samples is not None
    assert samples[0] == 3
    assert y.tolist() == [[8.0] * 3, [4.0] * 3, [4.0] * 3]
    compiled = counters.value("UncachedCompile")
    for _ in range(3):
        y = x @ x
    assert counters.value("UncachedCompile") == compiled
    executions()
    xla.eager_mode(False)
    y = y + 1
    assert executions() == 0


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def losses(steps: int) -> list[float]:
    """Of a small network, trained by hand."""
    model = network().to("xla")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        images = torch.randn(6, 1, 8, 8, generator=generator)
        targets = torch.randint(0, 3, (6,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to("xla")), targets.to("xla"))
        loss.backward()
        optimizer.step()
        xla.sync()
        found.append(loss)
    return [loss.item() for loss in found]


def test_training_is_the_same_in_both_modes() -> None:
    lazy = losses(8)
    xla.eager_mode(True)
    assert losses(8) == pytest.approx(lazy, rel=1e-5)


def test_random_numbers_are_the_same_in_both_modes() -> None:
    xla.manual_seed(3)
    lazy = torch.rand(4, device="xla") + torch.randn(4, device="xla")
    xla.sync()
    xla.manual_seed(3)
    xla.eager_mode(True)
    eager = torch.rand(4, device="xla") + torch.randn(4, device="xla")
    torch.testing.assert_close(eager.cpu(), lazy.cpu())  # fused, the sum is rounded once


def test_a_compiled_function_stays_one_program_in_eager_mode() -> None:
    xla.eager_mode(True)
    x = torch.ones(4).to("xla")
    step = xla.compile(lambda x: (x + 1).exp().sum())
    executions = Executions()
    for _ in range(4):
        step(x)
        assert executions() == 1
    (x + 1).exp()
    assert executions() == 2


def test_the_mode_outlives_an_error() -> None:
    xla.eager_mode(True)

    @xla.compile
    def fails(x: Tensor) -> Tensor:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        fails(torch.ones(2, device="xla"))
    executions = Executions()
    with pytest.raises(KeyError), xla.compile():
        raise KeyError
    torch.ones(2).to("xla") + 1
    assert executions() == 1


def test_a_block_is_one_program() -> None:
    x = torch.ones(4).to("xla")
    pending = x * 3
    executions = Executions()
    with xla.compile():
        assert executions() == 1  # what was pending
        y = x + 1
        z = y * 2
        assert executions() == 0
    assert executions() == 1
    with xla.step():
        z += 1
    assert executions() == 1
    assert (pending.tolist(), z.tolist()) == ([3.0] * 4, [5.0] * 4)


def test_a_decorator_with_arguments() -> None:
    @xla.compile(name="the step", full_graph=True)
    def step(x: Tensor) -> Tensor:
        """Adds one."""
        return x + 1

    assert step(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
    assert (step.__doc__, step.step.name) == ("Adds one.", "the step")


@pytest.mark.parametrize("replay", ["watched", "unwatched"])
def test_full_graph_names_the_line_that_breaks_it(replay: str) -> None:
    def step(x: Tensor) -> Tensor:
        y = x * 2
        if y.sum() > 0:  # this one
            return y
        return x

    x = torch.ones(3).to("xla")
    with config.override(replay="on" if replay == "watched" else "off"):
        assert xla.compile(step)(x).tolist() == [2.0] * 3
        line = step.__code__.co_firstlineno + 2
        with pytest.raises(GraphBreakError, match=rf"reads a value.*{__file__}:{line} in step"):
            xla.compile(step, full_graph=True)(x)
        with pytest.raises(GraphBreakError, match="sync"):
            xla.compile(lambda x: (x + 1, xla.sync()), full_graph=True)(x)
    with pytest.raises(GraphBreakError, match="reads a value"), xla.compile(full_graph=True):
        (x + 1).tolist()
    assert (x + 1).tolist() == [2.0] * 3  # outside nothing is forbidden


def test_the_limit_of_graphs_says_what_changed() -> None:
    step = xla.compile(lambda x: x.sin() * 2, name="my step", num_different_graphs_allowed=2)
    for rows in (2, 3, 2, 3):
        step(torch.ones(rows, device="xla"))
    with pytest.raises(
        GraphLimitError, match=r"my step has come to 3 different graphs, and 2 are allowed .* dimension 0 was 3, is 4"
    ):
        step(torch.ones(4, device="xla"))
    block = xla.compile(num_different_graphs_allowed=1)
    for rows in (2, 2):
        with block:
            y = torch.ones(rows).to("xla") + 1
    with pytest.raises(GraphLimitError, match="dimension 0 was 2, is 3"), block:
        y = torch.ones(3).to("xla") + 1
    assert y.tolist() == [2.0] * 3


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        xla.compile(num_different_graphs_allowed=0)
    block = xla.compile()
    with pytest.raises(RuntimeError, match="entered already"), block, block:
        pass
