"""A replayed function gives what its Python would have given, and says why it runs its Python."""

import copy
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xlatrainer as xla
from xlatrainer import config
from xlatrainer.backend import counters

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
}


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)).double()


def batch(index: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def on_xla(index: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    x, y = batch(index, rows)
    return x.to("xla"), y.to("xla")


class Training:
    """A model with an optimizer, and its step."""

    def __init__(self, device: str = "xla", optimizer: str = "momentum", model: nn.Module | None = None) -> None:
        self.model = (network() if model is None else copy.deepcopy(model)).to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler: Any = None

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


Change = Callable[[Training, int], None]


def run(training: Training, steps: int, change: Change | None, device: str, compiled: bool) -> list[float]:
    step = xla.compile(training.step) if compiled else training.step
    losses = []
    for index in range(steps):
        if change is not None:
            change(training, index)
        x, y = batch(index)
        losses.append(step(x.to(device), y.to(device)).item())
    return losses


def compare(make: Callable[[str], Training], change: Change | None = None, steps: int = 12) -> int:
    """Train eagerly on the CPU and compiled on the device; returns how many steps were replayed."""
    expected = run(make("cpu"), steps, change, "cpu", compiled=False)
    before = counters.value("Replay")
    assert run(make("xla"), steps, change, "xla", compiled=True) == pytest.approx(expected, rel=1e-9)
    return counters.value("Replay") - before


# what is replayed


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_with_a_changing_learning_rate(optimizer: str) -> None:
    def change(training: Training, index: int) -> None:
        training.optimizer.param_groups[0]["lr"] = 0.02 / (1 + index)

    # One observation more than without: two steps must agree after the state was made.
    assert compare(lambda device: Training(device, optimizer), change) >= 8


def test_a_scheduler_outside_of_the_step() -> None:
    def make(device: str) -> Training:
        training = Training(device, "adamw")
        training.scheduler = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.1, total_steps=30)
        return training

    def change(training: Training, index: int) -> None:
        if index:
            training.scheduler.step()

    # The scheduler is reachable from the step here, so its own numbers count as a change: all of it runs lazily.
    compare(make, change)

    scheduled: list[Any] = []

    def apart(device: str) -> Training:
        training = Training(device, "adamw")
        scheduled[:] = [torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.1, total_steps=30)]
        return training

    def change_apart(training: Training, index: int) -> None:
        if index:
            scheduled[0].step()

    assert compare(apart, change_apart) >= 8


def test_two_groups_and_a_frozen_parameter() -> None:
    def make(device: str) -> Training:
        training = Training(device)
        training.model[0].bias.requires_grad_(False)
        first, last = training.model[0].parameters(), training.model[4].parameters()
        training.optimizer = torch.optim.AdamW([{"params": first, "lr": 0.05}, {"params": last, "weight_decay": 0.3}])
        return training

    assert compare(make) >= 8


def test_gradients_that_accumulate() -> None:
    class Accumulating(Training):
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

    def make(device: str) -> Training:
        return Accumulating(device)

    def change(training: Training, index: int) -> None:
        if index % 3 == 2:
            training.optimizer.step()
            training.optimizer.zero_grad()

    compare(make, change)
    training = make("xla")
    step = xla.compile(training.step)
    for index in range(4):
        step(*on_xla(index))
    reference = make("cpu")
    for index in range(4):
        reference.step(*batch(index))
    for mine, theirs in zip(training.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_random_numbers_are_those_of_the_lazy_run() -> None:
    def losses(replay: str) -> list[float]:
        xla.manual_seed(7)
        training = Training(model=network(dropout=0.5))
        step = xla.compile(training.step)
        with config.override(replay=replay):
            return [step(*on_xla(index)).item() for index in range(8)]

    before = counters.value("Replay")
    lazy, replayed = losses("off"), losses("on")
    assert replayed == lazy
    assert counters.value("Replay") - before >= 4


def test_a_short_batch_is_a_plan_of_its_own() -> None:
    training, reference = Training(optimizer="adam"), Training("cpu", optimizer="adam")
    step = xla.compile(training.step)
    before = counters.value("Replay")
    for index in range(16):
        rows = 3 if index % 4 == 3 else 5
        expected = reference.step(*batch(index, rows)).item()
        assert step(*on_xla(index, rows)).item() == pytest.approx(expected, rel=1e-9)
    assert counters.value("Replay") - before >= 8


def test_state_that_is_another_tensor_in_every_step() -> None:
    class Recurrent:
        def __init__(self) -> None:
            self.state = torch.zeros(3, device="xla")
            self.history: dict[str, Tensor] = {"last": torch.zeros(3, device="xla")}

        def step(self, x: Tensor) -> Tensor:
            self.history["last"] = self.state
            self.state = self.state * 0.5 + x
            return self.state.sum()

    model = Recurrent()
    step = xla.compile(model.step)
    before = counters.value("Replay")
    state, kept = torch.zeros(3), []
    for index in range(8):
        last, state = state, state * 0.5 + index + 1
        kept.append(model.state)
        assert step(torch.full((3,), index + 1.0, device="xla")).item() == pytest.approx(state.sum().item())
        torch.testing.assert_close(model.state.cpu(), state)
        torch.testing.assert_close(model.history["last"].cpu(), last)
    assert counters.value("Replay") - before >= 4
    assert len({tuple(tensor.tolist()) for tensor in kept}) == 8  # earlier states stay what they were


def test_a_kept_result_stays_what_it_was() -> None:
    training = Training()
    step = xla.compile(training.step)
    kept = [step(*on_xla(0)) for _ in range(6)]
    weights = [training.model[0].weight.clone()]
    step(*on_xla(0))
    values = [tensor.item() for tensor in kept]
    assert len(set(values)) == 6
    assert not torch.equal(weights[0].cpu(), training.model[0].weight.cpu())


def test_cpu_arguments_are_copied_in_every_call() -> None:
    weight = torch.ones(3, device="xla")
    before = counters.value("Replay")

    @xla.compile
    def product(x: Tensor) -> Tensor:
        return weight * x.to("xla")

    for index in range(6):
        assert product(torch.full((3,), float(index))).tolist() == [float(index)] * 3
    assert counters.value("Replay") - before == 4


def test_a_tensor_made_of_constants() -> None:
    @xla.compile
    def shifted(x: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0], device="xla")

    before = counters.value("Replay")
    for index in range(5):
        assert shifted(torch.full((2,), float(index), device="xla")).tolist() == [index + 1.0, index + 2.0]
    assert counters.value("Replay") - before == 3


def test_a_module_in_eval_mode() -> None:
    model = network().to("xla").eval()
    reference = network().eval()
    forward = xla.compile(model)
    before = counters.value("Replay")
    with torch.no_grad():
        for index in range(5):
            torch.testing.assert_close(forward(on_xla(index)[0]).cpu(), reference(batch(index)[0]))
    assert counters.value("Replay") - before == 3


def test_structured_arguments_and_results() -> None:
    @xla.compile
    def step(inputs: dict[str, Tensor], *, scale: float) -> dict[str, Any]:
        return {"sum": inputs["a"] + inputs["b"], "parts": [inputs["a"] * scale, 3, "text"]}

    for index in range(5):
        a = torch.full((2,), float(index), device="xla")
        result = step({"a": a, "b": a}, scale=2.0)
        assert result["sum"].tolist() == [2.0 * index] * 2
        assert result["parts"][0].tolist() == [2.0 * index] * 2
        assert result["parts"][1:] == [3, "text"]
    assert step({"a": a, "b": a}, scale=3.0)["parts"][0].tolist() == [12.0] * 2
    assert step.step.reason == "it was not observed before"


# what changes between steps


def _set(attribute: str, value: Any) -> Change:
    def change(training: Training, index: int) -> None:
        if index == 6:
            setattr(training.model[0], attribute, value)

    return change


def _at(step: int, action: Callable[[Training], Any]) -> Change:
    def change(training: Training, index: int) -> None:
        if index == step:
            action(training)

    return change


@torch.no_grad()
def _double_weights(training: Training) -> None:
    training.model[0].weight.mul_(2)


def _new_data(training: Training) -> None:
    training.model[0].weight.data = training.model[0].weight.data * 2


def _load(training: Training) -> None:
    training.model.load_state_dict(network().state_dict())


def _load_optimizer(training: Training) -> None:
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def _hook(training: Training) -> None:
    training.model[0].register_forward_hook(lambda module, inputs, output: output * 2)


CHANGES: dict[str, Change] = {
    "eval mode": _at(6, lambda t: t.model.eval()),
    "one module in eval mode": _at(6, lambda t: t.model[1].eval()),
    "a frozen parameter": _at(6, lambda t: t.model[0].weight.requires_grad_(False)),
    "another activation": _at(6, lambda t: t.model.__setitem__(2, nn.Tanh())),
    "a setting of a module": _at(6, lambda t: setattr(t.model[1], "momentum", 0.5)),
    "another eps": _at(6, lambda t: setattr(t.model[1], "eps", 0.1)),
    "weight decay from nothing": _at(6, lambda t: t.optimizer.param_groups[0].update(weight_decay=0.0)),
    "no momentum": _at(6, lambda t: t.optimizer.param_groups[0].update(momentum=0.0)),
    "maximize": _at(6, lambda t: t.optimizer.param_groups[0].update(maximize=True)),
    "weights changed in place": _at(6, _double_weights),
    "weights with other data": _at(6, _new_data),
    "loaded weights": _at(6, _load),
    "a loaded optimizer": _at(6, _load_optimizer),
    "a cleared optimizer": _at(6, lambda t: t.optimizer.state.clear()),
    "a hook": _at(6, _hook),
    "another parameter": _at(6, lambda t: setattr(t.model[0], "bias", None)),
    "a parameter group more": _at(
        6, lambda t: t.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_change_from_outside_counts_at_once(change: str, optimizer: str) -> None:
    if change in ("no momentum",) and optimizer == "adamw":
        change = "maximize"
    assert compare(lambda device: Training(device, optimizer), CHANGES[change]) >= 2


def test_the_mode_of_torch() -> None:
    weight = torch.ones(2, device="xla", requires_grad=True)

    @xla.compile
    def product(x: Tensor) -> Tensor:
        return weight * x

    x = torch.ones(2, device="xla")
    with torch.no_grad():
        for _ in range(4):
            assert not product(x).requires_grad
    assert product(x).requires_grad


# what is never replayed


class Impure(nn.Module):
    """Does `kind` in its forward pass."""

    kind = "nothing"
    class_calls = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(6, 3).double()
        self.calls = 0
        self.log: list[int] = []
        self.seen: set[int] = set()
        self.generator = random.Random(1)
        self.numpy = np.random.default_rng(2)
        self.array = np.zeros(3)
        self.host = torch.zeros(())
        self.steps = iter(range(1, 1000)) if kind == "an iterator" else None

    def factor(self, x: Tensor) -> float:
        if self.kind == "a counter":
            self.calls += 1
            return 1.0 + self.calls // 5
        if self.kind == "a list":
            self.log.append(1)
            return float(len(self.log))
        if self.kind == "a set":
            self.seen.add(len(self.seen))
            return float(len(self.seen))
        if self.kind == "the class":
            Impure.class_calls += 1
            return 1.0 + Impure.class_calls % 3
        if self.kind == "a global":
            return 1.0 + count_global() % 3
        if self.kind == "python's random":
            return random.random()
        if self.kind == "numpy's random":
            return float(np.random.rand())
        if self.kind == "torch's random":
            return float(torch.rand(()))
        if self.kind == "own random":
            return self.generator.random()
        if self.kind == "own numpy random":
            return float(self.numpy.random())
        if self.kind == "an array":
            self.array += 1
            return float(self.array[0])
        if self.kind == "a host tensor":
            self.host += 1
            return float(self.host)
        if self.kind == "an iterator":
            return float(next(self.steps))
        if self.kind == "a value":
            return 2.0 if x.sum().item() > 0 else 1.0
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.factor(x))


GLOBAL = {"calls": 0}


def count_global() -> int:
    GLOBAL["calls"] += 1
    return GLOBAL["calls"]


IMPURE = [
    "a counter", "a list", "a set", "the class", "a global", "python's random", "numpy's random", "torch's random",
    "own random", "own numpy random", "an array", "a host tensor", "an iterator", "a value",
]  # fmt: skip


@pytest.mark.parametrize("kind", IMPURE)
def test_python_that_matters_runs_every_time(kind: str) -> None:
    def seeded(device: str) -> Training:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        GLOBAL["calls"] = Impure.class_calls = 0
        return Training(device, model=Impure(kind))

    model = Impure(kind)
    expected, actual = [], []
    for device, losses in (("cpu", expected), ("xla", actual)):
        training = seeded(device)
        training.model = Impure(kind).to(device)
        training.model.load_state_dict(model.state_dict())
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
        losses += run(training, 12, None, device, compiled=device == "xla")
    assert actual == pytest.approx(expected, rel=1e-9)


def test_the_reason_is_given() -> None:
    step = xla.compile(Training(model=Impure("a counter")).step)
    for index in range(3):
        step(*on_xla(index))
    assert "calls changed from 1 to 2" in step.step.reason or "calls changed from 2 to 3" in step.step.reason
    step = xla.compile(Training(model=Impure("a value")).step)
    for index in range(3):
        step(*on_xla(index))
    assert "it reads a value" in step.step.reason
    assert "test_step.py" in step.step.reason


def test_a_forward_pass_whose_gradient_is_wanted_keeps_its_graph() -> None:
    model = network().to("xla")
    forward = xla.compile(model)
    for index in range(5):
        x, y = on_xla(index)
        model.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        assert model[0].weight.grad.abs().sum().item() > 0
    assert "gradient" in forward.step.reason or "keeps a value" in forward.step.reason


def test_what_it_raises_comes_through_and_changes_nothing() -> None:
    training = Training()
    step = xla.compile(training.step)
    for index in range(4):
        step(*on_xla(index))
    x, y = on_xla(4)
    with pytest.raises((RuntimeError, ValueError)):
        step(x[:, :3], y)
    reference = Training("cpu")
    losses = [reference.step(*batch(index)).item() for index in range(6)]
    assert step(x, y).item() == pytest.approx(losses[4], rel=1e-9)
    assert step(*on_xla(5)).item() == pytest.approx(losses[5], rel=1e-9)


def test_an_index_out_of_range_is_reported() -> None:
    table = torch.ones(4, 2, device="xla")

    @xla.compile
    def look_up(index: Tensor) -> Tensor:
        return F.embedding(index, table)

    for _ in range(4):
        look_up(torch.tensor([1, 3], device="xla"))
    with pytest.raises(IndexError):
        look_up(torch.tensor([1, 4], device="xla")).cpu()


def test_a_replay_runs_one_program_and_copies_nothing() -> None:
    training = Training()
    step = xla.compile(training.step)
    x, y = on_xla(0)
    for _ in range(4):
        step(x, y)
    before = counters.snapshot()
    step(x, y)
    after = counters.snapshot()
    changed = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    assert changed == {"Execute": 1, "Replay": 1}


def test_switched_off_it_only_ends_steps() -> None:
    training = Training()
    step = xla.compile(training.step)
    before = counters.value("Replay")
    with config.override(replay="off"):
        for index in range(5):
            step(*on_xla(index))
    assert counters.value("Replay") == before


@pytest.mark.parametrize("wrong", [3, "text"])
def test_what_cannot_be_called_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="takes a function or a module"):
        xla.compile(wrong)


SCRIPT = """
import torch
import xlatrainer as xla

weight = torch.ones(3, device="xla", requires_grad=True)
optimizer = torch.optim.Adam([weight], lr=0.1)


@xla.compile
def step(x):
    optimizer.zero_grad()
    loss = (weight * x).square().sum()
    loss.backward()
    optimizer.step()
    return loss


for _ in range(6):
    step(torch.ones(3, device="xla"))
replays = xla.counters.value("Replay")
"""


def test_a_compiled_function_named_like_a_method_it_calls(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    before = counters.value("Replay")
    assert runpy.run_path(str(script))["replays"] - before == 3  # the first makes state, the next two agree
