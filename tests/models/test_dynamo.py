"""`torch.compile(backend="openxla")` of real models: eager's results, and no Python of the model afterwards."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
import transformers as hf
from torch import Tensor, nn

from tests.models.harness import TOLERANCE, tie
from xlatrainer.backend import counters

pytestmark = pytest.mark.models


class Told(nn.Module):
    """A model that says how often its Python runs, and returns scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: list[str] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls.append("forward")
        output = self.model(inputs)
        return getattr(output, "logits", output)


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    model = torchvision.models.resnet18(weights=None, num_classes=10)
    return model, torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,))


def gpt2() -> tuple[nn.Module, Tensor, Tensor]:
    config = hf.GPT2Config(
        vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(0, 100, (3, 16))
    return hf.GPT2LMHeadModel(config), ids, ids.roll(-1, 1)


def step(model: nn.Module, call: Any, inputs: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """Loss and total norm of the gradient."""
    model.zero_grad()
    loss = F.cross_entropy(call(inputs).flatten(0, -2), targets.flatten())
    loss.backward()
    norms = [parameter.grad.norm().cpu() for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), torch.stack(norms).norm()


@pytest.mark.parametrize("make", [resnet, gpt2], ids=lambda make: make.__name__)
def test_training_and_inference(make: Any) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, inputs, targets = make()
    model = model.double()  # in float32 rounding errors grow into more than the tolerance
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    eager, placed = Told(model), Told(tie(copy.deepcopy(model).to("xla"), model))
    compiled = torch.compile(placed, backend="openxla")
    moved = inputs.to("xla"), targets.to("xla")
    for _ in range(4):
        expected, actual = step(eager, eager, inputs, targets), step(placed, compiled, *moved)
        assert actual[0] == pytest.approx(expected[0], rel=TOLERANCE)
        torch.testing.assert_close(actual[1], expected[1], rtol=TOLERANCE, atol=0)
    assert (len(eager.calls), placed.calls) == (4, [])
    eager.eval()
    placed.eval()
    with torch.no_grad():
        for _ in range(4):
            before = counters.snapshot()
            torch.testing.assert_close(compiled(moved[0]).cpu(), eager(inputs), rtol=TOLERANCE, atol=TOLERANCE)
    assert counters.value("Replay") == before.get("Replay", 0) + 1
    assert counters.value("Execute") == before["Execute"] + 1
    assert placed.calls == []
    torch.compiler.reset()
