"""`fused=True` optimizers and the gradient scaler run on the device and step as on the CPU."""

from typing import Any

import pytest
import torch

import xlatrainer as xla
from xlatrainer.backend import counters

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "Adam with everything": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {}),
    "SGD with everything": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD with dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
}


def _model(device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3).to(device), torch.arange(8.0).view(2, 4).to(device) / 8


def _trained(device: str, name: str) -> list[torch.Tensor]:
    model, inputs = _model(device)
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), lr=0.01, fused=True, **options)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        optimizer.zero_grad()
        (model(inputs) ** 2).sum().backward()
        optimizer.step()
        xla.sync()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_the_cpus(name: str) -> None:
    expected = _trained("cpu", name)
    counters.reset()
    actual = _trained("xla", name)
    assert not [counter for counter in counters.snapshot() if counter.startswith("aten::")]
    assert counters.value("UncachedCompile") <= 3  # a changing learning rate is an input
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaler(fused: bool) -> None:
    def train(device: str) -> tuple[list[float], list[torch.Tensor]]:
        model, inputs = _model(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2)
        scales = []
        for step in range(5):
            optimizer.zero_grad()
            loss = (model(inputs) ** 2).sum() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [parameter.detach().cpu() for parameter in model.parameters()]

    counters.reset()
    scales, parameters = train("xla")
    assert not [counter for counter in counters.snapshot() if counter.startswith("aten::")]
    expected_scales, expected = train("cpu")
    assert scales == expected_scales == [4, 8, 4, 4, 8]
    torch.testing.assert_close(parameters, expected)
