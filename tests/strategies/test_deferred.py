"""A model without contents, made under `torch.device("meta")`, gets them at its strategy's setup, part by part."""

from typing import Any

import jax
import pytest
import torch
from torch import nn

from tests.strategies.models import GPT, batches
from xlatrainer.backend import runtime
from xlatrainer.strategies import FSDPStrategy
from xlatrainer.trainer.trainer import Trainer


def make(device: str) -> GPT:
    torch.manual_seed(1)
    with torch.device(device):
        return GPT()


def test_it_is_the_model_that_the_cpu_makes_and_no_device_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[tuple[int, ...]] = []

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(x: Any, *arguments: Any, **options: Any) -> Any:
            put.extend(jax.typeof(leaf).shape for leaf in jax.tree.leaves(x))
            return function(x, *arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    expected = {name: parameter.detach().clone() for name, parameter in make("cpu").named_parameters()}
    model = make("meta")
    torch.manual_seed(1)
    watch(jax, "device_put")
    watch(runtime, "put_on_device")
    trainer = Trainer(model, loss="cross_entropy", strategy="fsdp")
    monkeypatch.undo()
    matrices = {tuple(value.shape) for value in expected.values() if value.dim() > 1}
    assert (16, 8) in put  # the position embedding's part
    assert not matrices & set(put)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), expected[name]), name
    assert model.head.weight is model.token.weight
    history = trainer.fit(batches("gpt", 3), epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))


class Rotary(nn.Module):
    """A buffer that its __init__ computes, and reset_parameters does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("frequencies", torch.arange(16.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def test_a_module_that_cannot_initialize_itself_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Scale())
    with pytest.raises(ValueError, match=r"1 \(Scale\) has gain on the meta device and no method reset_parameters\(\)"):
        FSDPStrategy().setup(model)


def test_what_reset_parameters_leaves_out_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Rotary())
    with pytest.raises(ValueError, match=r"1 \(Rotary\): reset_parameters\(\) leaves frequencies without contents"):
        FSDPStrategy().setup(model)


def test_buffers_are_initialized_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    FSDPStrategy(2).setup(model)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.running_mean.cpu().tolist() == [0.0] * 8
    assert norm.running_var.cpu().tolist() == norm.weight.cpu().tolist() == [1.0] * 8
    assert int(norm.num_batches_tracked.cpu()) == 0  # type: ignore[union-attr]
