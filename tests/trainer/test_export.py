"""Exported models, each run by the program that it is for."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trainer.helpers import DEVICES, class_batches, classifier, strategy_on
from xlatrainer.backend._private_api import xla_client
from xlatrainer.trainer.trainer import Trainer


class TwoInputs(nn.Module):
    """Of keyword arguments, with tied weights and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        hidden = self.dropout(self.embed(ids).mean(1)) * scale.unsqueeze(1)
        return {"scores": self.head(hidden), "hidden": hidden}


def trained(device: str) -> Trainer:
    trainer = Trainer(classifier(), "sgd", strategy=strategy_on(device))
    trainer.fit(class_batches(), verbose=0)
    return trainer


INPUTS = class_batches()[0][0]
KEYWORDS = {"ids": torch.arange(12).reshape(3, 4) % 11, "scale": torch.tensor([1.0, 2.0, 3.0])}


@pytest.mark.parametrize("device", DEVICES)
def test_for_torch(device: str, tmp_path: Path) -> None:
    trainer = trained(device)
    expected = trainer.predict(INPUTS[:5], verbose=0)
    rows = torch.export.Dim("rows")
    trainer.export(tmp_path / "model.pt2", INPUTS, dynamic_shapes=({0: rows},))
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(INPUTS[:5]), expected, atol=1e-5, rtol=1e-5)
    assert trainer.model.training
    assert trainer.model[0].weight.device.type == device


@pytest.mark.parametrize("device", DEVICES)
def test_for_xla(device: str, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers")
    trainer = trained(device)
    trainer.export(tmp_path / "model.stablehlo", INPUTS, format="stablehlo")
    program = jax.export.deserialize(bytearray((tmp_path / "model.stablehlo").read_bytes()))
    (scores,) = program.call(INPUTS.numpy())
    np.testing.assert_allclose(scores, trainer.predict(INPUTS, verbose=0), atol=1e-5, rtol=1e-5)


def test_for_xla_as_text(tmp_path: Path) -> None:
    """The text is compiled and run by XLA itself."""
    trainer = trained("cpu")
    trainer.export(tmp_path / "model.mlir", INPUTS, format="stablehlo")
    text = (tmp_path / "model.mlir").read_text()
    assert "stablehlo.dot_general" in text
    client = jax.devices()[0].client
    devices = client.local_devices()[:1]
    loaded = client.compile_and_load(text, xla_client.DeviceList(tuple(devices)))
    (scores,) = loaded.execute_sharded([jax.device_put(INPUTS.numpy())]).disassemble_into_single_device_arrays()
    np.testing.assert_allclose(scores[0], trainer.predict(INPUTS, verbose=0), atol=1e-5, rtol=1e-5)


def test_keywords_and_several_outputs(tmp_path: Path) -> None:
    trainer = Trainer(TwoInputs(), "sgd")
    model = trainer.model.eval()
    expected = {name: value.detach().cpu() for name, value in model(**on_xla()).items()}
    trainer.export(tmp_path / "model.pt2", KEYWORDS)
    found = torch.export.load(tmp_path / "model.pt2").module()(**KEYWORDS)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    trainer.export("memory://exported/model.mlir", KEYWORDS, format="stablehlo")
    pytest.importorskip("flatbuffers")
    trainer.export(tmp_path / "model", KEYWORDS, format="stablehlo")
    program = jax.export.deserialize(bytearray((tmp_path / "model").read_bytes()))
    with jax.enable_x64(True):
        scores, hidden = program.call(*(value.numpy() for value in KEYWORDS.values()))
    np.testing.assert_allclose(scores, expected["scores"], atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(hidden, expected["hidden"], atol=1e-6, rtol=1e-6)


def on_xla() -> dict[str, Tensor]:
    return {name: value.to("xla") for name, value in KEYWORDS.items()}


def test_for_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    trainer = trained("cpu")
    trainer.export(tmp_path / "model.onnx", INPUTS, format="onnx")
    evaluator = reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    (name,) = evaluator.input_names
    (scores,) = evaluator.run(None, {name: INPUTS.numpy()})
    np.testing.assert_allclose(scores, trainer.predict(INPUTS, verbose=0), atol=1e-5, rtol=1e-5)


def test_without_onnx_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    pytest.importorskip("onnx")
    with pytest.raises(ImportError, match=r'onnxscript.*pip install "xlatrainer\[onnx\]"'):
        trained("cpu").export(tmp_path / "model.onnx", INPUTS, format="onnx")
    assert list(tmp_path.iterdir()) == []


class Reading(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1.0 if input.sum().item() > 0 else 2.0)


class Noisy(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + torch.rand_like(input)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model is no single program: it reads values"):
        Trainer(Reading(2, 2), "sgd").export(tmp_path / "m.mlir", torch.ones(1, 2), format="stablehlo")
    with pytest.raises(ValueError, match="draws random numbers in eval mode"):
        Trainer(Noisy(2, 2), "sgd").export(tmp_path / "m.mlir", torch.ones(1, 2), format="stablehlo")
    trainer = trained("cpu")
    wrong: Any = "keras"
    with pytest.raises(ValueError, match='format must be "torch", "stablehlo" or "onnx", got \'keras\''):
        trainer.export(tmp_path / "m", INPUTS, format=wrong)
    with pytest.raises(ValueError, match="dynamic_shapes is for"):
        trainer.export(tmp_path / "m.mlir", INPUTS, format="stablehlo", dynamic_shapes=({0: 1},))
    assert list(tmp_path.iterdir()) == []
