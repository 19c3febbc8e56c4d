"""State made before the first step is what the first step would have begun with, for each optimizer of torch."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import xlatrainer as xla
from xlatrainer import config
from xlatrainer.backend import counters
from xlatrainer.backend.replay.optimizer_state import initialize_state
from xlatrainer.trainer.optimizers import OPTIMIZERS

CASES: dict[str, Any] = {
    **OPTIMIZERS,
    "sgd with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd with nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd with dampening": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "adam with amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "rmsprop, centered, with momentum": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
}
# Their first step does something else than the others, so that no state before it can stand for it.
NOT_FORESEEN = {"sgd with dampening", "nadam", "adamax", "asgd", "rprop", "adafactor"}


def _trained(make: Any, initialize: bool, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    optimizer = make(model.parameters())
    if initialize:
        initialize_state(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_with_it(name: str) -> None:
    model, optimizer = _trained(CASES[name], initialize=False)
    other, initialized = _trained(CASES[name], initialize=True)
    assert torch.equal(model.weight, other.weight)
    mine, theirs = (o.state_dict()["state"][0] if o.state else {} for o in (initialized, optimizer))
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("name", CASES)
def test_it_is_made_where_it_can_be_foreseen(name: str) -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = CASES[name](model.parameters())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    initialize_state(optimizer)
    made = optimizer.state_dict()["state"]
    _, stepped = _trained(CASES[name], initialize=False, steps=1)
    if name in NOT_FORESEEN:
        assert made.keys() == before.keys()
    else:
        assert made.keys() == stepped.state_dict()["state"].keys()


def test_a_state_that_is_there_stays() -> None:
    model, optimizer = _trained(CASES["adam"], initialize=False)
    before = copy.deepcopy(optimizer.state_dict())
    initialize_state(optimizer)
    after = optimizer.state_dict()
    assert torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])
    assert after["state"][0]["step"] == 3


def _steps(
    device: str, make: Any, compiled: bool, steps: int = 5
) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    """Of a compiled step, which nobody has told of its optimizer, on a model of which a part is not used."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(4, 3, bias=False), "unused": nn.Linear(2, 2, bias=False)}).to(device)
    optimizer = make(model.parameters())
    batches = [torch.randn(5, 4).to(device) for _ in range(steps)]

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model["used"](batch).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    run = xla.compile(step) if compiled else step
    xla.sync()  # Adagrad makes its state when it is made
    counters.reset()
    return [run(batch).item() for batch in batches], model, optimizer


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_step_is_one_program_from_the_first_on(name: str) -> None:
    expected, on_cpu, theirs = _steps("cpu", CASES[name], compiled=False)
    losses, model, optimizer = _steps("xla", CASES[name], compiled=True)
    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(model["used"].weight.cpu(), on_cpu["used"].weight, rtol=1e-4, atol=1e-5)
    assert optimizer.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    if name not in NOT_FORESEEN:
        assert counters.value("UncachedCompile") == 1


def test_a_step_is_not_cut_where_its_state_is_made() -> None:
    """A copy to the device ends a trace in which much is pending."""
    results = {}
    for device in ("cpu", "xla"):
        parameters = [nn.Parameter(torch.ones(2, device=device)) for _ in range(4)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

        def step(parameters: Any = parameters, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            sum((parameter * parameter).sum() for parameter in parameters).backward()
            optimizer.step()

        run = xla.compile(step) if device == "xla" else step
        xla.sync()
        counters.reset()
        with config.override(max_pending_nodes=10):
            for _ in range(4):
                run()
        results[device] = parameters[0].tolist()
    assert counters.value("UncachedCompile") == 1
    assert results["xla"] == pytest.approx(results["cpu"])
