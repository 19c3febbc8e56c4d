"""One device: the model moves in place and stays what it was; so do tied weights."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.helpers import DEVICES, class_batches, strategy_on
from xlatrainer.strategies.single import SingleDeviceStrategy
from xlatrainer.strategies.strategy import Strategy
from xlatrainer.trainer.trainer import Trainer


class Tied(nn.Module):
    """An autoencoder-like classifier whose two layers are one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def test_the_interface_is_narrow() -> None:
    assert len(Strategy.__abstractmethods__) <= 8


def test_the_default_is_xla() -> None:
    assert SingleDeviceStrategy().device == torch.device("xla", 0)


@pytest.mark.parametrize("device", DEVICES)
def test_setup_moves_the_same_parameters(device: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parameters = list(model.parameters())
    values = [parameter.detach().clone() for parameter in parameters]
    strategy = strategy_on(device)
    assert strategy.setup(model) is model
    for parameter, before, value in zip(model.parameters(), parameters, values, strict=True):
        assert parameter is before
        assert parameter.device.type == device
        assert torch.equal(parameter.detach().cpu(), value)
    assert all(buffer.device.type == device for buffer in model.buffers())


@pytest.mark.parametrize("device", DEVICES)
def test_tied_weights_stay_tied_and_train_as_one(device: str) -> None:
    model, batches = Tied(), class_batches()
    reference = copy.deepcopy(model)
    assert reference.first.weight is reference.second.weight
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(inputs), targets).backward()
        optimizer.step()
    Trainer(model, "sgd", learning_rate=0.1, strategy=strategy_on(device)).fit(batches, verbose=0)
    assert model.first.weight is model.second.weight
    torch.testing.assert_close(model.first.weight.detach().cpu(), reference.first.weight.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_unties_itself_is_tied_again(device: str) -> None:
    class Untying(Tied):
        def _apply(self, function: Any, recurse: bool = True) -> Any:
            self.second.weight = nn.Parameter(self.second.weight.detach().clone())
            return super()._apply(function, recurse)

    model = strategy_on(device).setup(Untying())
    assert model.first.weight is model.second.weight
    assert model.first.weight.device.type == device


def test_parameters_that_cannot_be_swapped_are_replaced_and_stay_tied() -> None:
    model = Tied()
    observer = weakref.ref(model.first.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer)
    assert observer() is not model.first.weight
    assert model.first.weight is model.second.weight
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    before = model.first.weight.detach().cpu()
    trainer.fit(class_batches(), verbose=0)
    assert not torch.equal(model.first.weight.detach().cpu(), before)


def test_the_setting_of_torch_is_left_as_it_was() -> None:
    SingleDeviceStrategy().setup(Tied())
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_two_parameters_over_one_memory_are_refused() -> None:
    model = Tied()
    model.second.weight = nn.Parameter(model.first.weight.data)
    SingleDeviceStrategy("cpu").setup(model)  # nothing moves, nothing comes apart
    with pytest.raises(ValueError, match=r"first.weight and second.weight share their memory.*b.weight = a.weight"):
        SingleDeviceStrategy("meta").setup(model)


@pytest.mark.parametrize("device", DEVICES)
def test_batches_go_there_and_values_come_back(device: str) -> None:
    strategy = strategy_on(device)
    x, y = torch.randn(3, 2), torch.tensor([1, 2, 3])
    batch = strategy.to_device({"x": x, "rest": (y, "text")})
    assert batch["x"].device.type == batch["rest"][0].device.type == device
    assert batch["rest"][1] == "text"
    total = batch["x"].sum() * 2
    strategy.end_step()
    fetched = strategy.fetch([total, batch["rest"][0]])
    assert [value.device.type for value in fetched] == ["cpu", "cpu"]
    torch.testing.assert_close(fetched[0], x.sum() * 2)
    assert torch.equal(fetched[1], y)
    assert strategy.is_ready(total)


def test_a_recorded_value_is_not_ready_on_xla() -> None:
    strategy = SingleDeviceStrategy()
    value = strategy.to_device(torch.ones(3)) + 1
    assert not strategy.is_ready(value)
    strategy.end_step()
    assert strategy.fetch([value])[0].tolist() == [2.0, 2.0, 2.0]
    assert strategy.is_ready(value)
