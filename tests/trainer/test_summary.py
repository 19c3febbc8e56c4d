"""The table of layers: shapes, parameters, tied weights once, operations by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trainer.helpers import DEVICES, classifier, strategy_on
from xlatrainer.backend import counters
from xlatrainer.trainer.trainer import Trainer


class Tied(nn.Module):
    """An embedding whose weights score the tokens; one layer is never called, one is defined after it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 10, bias=False)
        self.embedding = nn.Embedding(10, 6)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(6))
        self.score.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: Tensor, shift: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embedding(tokens) * self.scale
        return {"logits": self.score(hidden if shift is None else hidden + shift), "hidden": hidden}


@pytest.mark.parametrize("device", DEVICES)
def test_layers_shapes_and_operations(device: str) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=strategy_on(device))
    summary = trainer.summary(torch.zeros(5, 8))
    assert [(layer.name, layer.kind, layer.shapes, layer.num_parameters) for layer in summary.layers] == [
        ("0", "Linear", [(5, 16)], 128),
        ("1", "BatchNorm1d", [(5, 16)], 32),
        ("2", "ReLU", [(5, 16)], 0),
        ("3", "Linear", [(5, 3)], 51),
    ]
    assert (summary.num_parameters, summary.num_trainable, summary.num_bytes) == (211, 211, 844)
    assert summary.buffer_bytes == 16 * 4 * 2 + 8
    if device == "cpu":
        assert summary.flops is None
    else:
        products = 2 * 5 * (8 * 16 + 16 * 3)
        assert products < summary.flops < 1.5 * products
    assert trainer.model.training
    assert not any(module._forward_hooks for module in trainer.model.modules())


@pytest.mark.parametrize("device", DEVICES)
def test_tied_weights_count_once(device: str) -> None:
    model = Tied()
    model.scale.requires_grad_(False)
    trainer = Trainer(model, "sgd", strategy=strategy_on(device))
    summary = trainer.summary({"tokens": np.zeros((2, 4), np.int64), "shift": torch.zeros(6)})
    layers = {layer.name: layer for layer in summary.layers}
    assert list(layers) == ["embedding", "score", "", "unused"]
    assert layers["score"].num_parameters + layers["embedding"].num_parameters == 60
    assert layers["embedding"].tied or layers["score"].tied
    assert layers["unused"].shapes == []
    assert sorted(layers[""].shapes) == [(2, 4, 6), (2, 4, 10)]
    assert (summary.num_parameters, summary.num_trainable) == (72, 66)
    assert summary.num_parameters == sum(layer.num_parameters for layer in summary.layers)


def test_the_table_and_no_example() -> None:
    trainer = Trainer(Tied(), "sgd", strategy=strategy_on("cpu"))
    lines = str(trainer.summary()).splitlines()
    assert lines[0].split() == ["Layer", "Output", "shape", "Parameters", "Bytes"]
    assert any(line.startswith("embedding (Embedding, weight is score.weight)") for line in lines)
    assert any(line.startswith("the model (Tied)") and line.endswith(" 6     24") for line in lines)
    assert lines[-2:] == [
        "Parameters: 72 (72 trained, 0 frozen)",
        "Memory: 288 bytes of parameters, 24 of buffers",
    ]
    assert repr(trainer.summary()) == str(trainer.summary())


def test_it_runs_the_model_once_and_leaves_the_training_as_it_was() -> None:
    trainer = Trainer(classifier(width=19), "sgd")
    before = counters.snapshot()
    summary = trainer.summary(torch.zeros(5, 8))
    assert counters.value("Execute") - before.get("Execute", 0) == 1
    assert counters.value("TransferFromDevice") == before.get("TransferFromDevice", 0)
    assert "floating-point operations" in str(summary)


@pytest.mark.parametrize("size", [10, 130])
def test_a_convolution(size: int) -> None:
    """Large images, too, which the CPU takes a span at a time."""
    trainer = Trainer(nn.Conv2d(3, 64, 3), "sgd")
    flops = trainer.summary(torch.zeros(12, 3, size, size)).flops
    outputs = 12 * (size - 2) ** 2 * 64
    assert flops == outputs * 27 * 2 + outputs  # and the bias


class Reading(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 2 if inputs.sum().item() > 0 else inputs @ inputs.T


def test_a_model_that_reads_values_has_no_single_program() -> None:
    trainer = Trainer(nn.Sequential(nn.Linear(2, 2), Reading()), "sgd")
    assert trainer.summary(torch.ones(2, 2)).flops is None
