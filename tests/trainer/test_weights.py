"""Weights alone: files that any program reads, from wherever they come."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from tests.trainer.helpers import DEVICES, ON_CPU, class_batches, classifier, strategy_on
from xlatrainer.errors import CheckpointError
from xlatrainer.trainer.trainer import Trainer
from xlatrainer.trainer.weights import renamed


def trainer_of(model: nn.Module, device: str = "cpu") -> Trainer:
    return Trainer(model, "sgd", strategy=strategy_on(device))


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_trip(device: str, tmp_path: Path) -> None:
    first = trainer_of(classifier(), device)
    first.fit(class_batches(), verbose=0)
    first.save_weights(tmp_path / "new" / "weights.safetensors")
    second = trainer_of(classifier(seed=9), device)
    assert second.load_weights(tmp_path / "new" / "weights.safetensors") == ([], [])
    for name, value in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name].cpu(), value.cpu())
    assert second.step == 0
    assert first.evaluate(class_batches(), verbose=0) == second.evaluate(class_batches(), verbose=0)


def test_anywhere() -> None:
    first, second = trainer_of(classifier()), trainer_of(classifier(seed=9))
    first.save_weights("memory://weights/model.safetensors")
    second.load_weights("memory://weights/model.safetensors")
    assert torch.equal(first.model[0].weight, second.model[0].weight)
    first.save("memory://weights/checkpoint")
    third = trainer_of(classifier(seed=8))
    third.load_weights("memory://weights/checkpoint")
    assert torch.equal(first.model[0].weight, third.model[0].weight)
    with pytest.raises(FileNotFoundError, match="memory://weights/none does not exist"):
        third.load_weights("memory://weights/none")


def test_other_programs_read_the_file(tmp_path: Path) -> None:
    first = trainer_of(tied())
    first.save_weights(tmp_path / "model.safetensors")
    assert list(load_file(tmp_path / "model.safetensors")) == ["embed.weight"]
    plain = tied()
    load_model(plain, tmp_path / "model.safetensors")
    assert torch.equal(plain["head"].weight, first.model["embed"].weight)


def test_a_folder_as_hugging_face_writes_it(tmp_path: Path) -> None:
    """In several files, with the tied weight under one of its names only."""
    weight = torch.randn(7, 3)
    save_file({"head.weight": weight}, tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({"other": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors", {"format": "pt"})
    files = {"head.weight": "model-00001-of-00002.safetensors", "other": "model-00002-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    trainer = trainer_of(tied())
    assert trainer.load_weights(tmp_path, strict=False) == ([], ["other"])
    assert torch.equal(trainer.model["embed"].weight, weight)
    assert trainer.model["embed"].weight is trainer.model["head"].weight
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no weights: it has no model-00002-of-00002.safetensors"):
        trainer.load_weights(tmp_path)


def test_a_state_dict_of_torch(tmp_path: Path) -> None:
    model = classifier()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    trainer = trainer_of(classifier(seed=9))
    trainer.load_weights(tmp_path / "model.pt")
    assert torch.equal(trainer.model[0].weight, model[0].weight)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="list.pt holds no weights by name. Accepted: a .safetensors file"):
        trainer.load_weights(tmp_path / "list.pt")


def test_what_does_not_fit(tmp_path: Path) -> None:
    trainer = trainer_of(classifier())
    trainer.save_weights(tmp_path / "w.safetensors")
    wider = trainer_of(classifier(width=20))
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
        wider.load_weights(tmp_path / "w.safetensors", strict=False)
    backbone = trainer_of(nn.ModuleDict({"backbone": classifier(seed=9), "head": nn.Linear(3, 2)}))
    with pytest.raises(RuntimeError, match="Missing key"):
        backbone.load_weights(tmp_path / "w.safetensors", map={"": "backbone."})
    loaded = backbone.load_weights(tmp_path / "w.safetensors", map={"": "backbone."}, strict=False)
    assert loaded == (["head.weight", "head.bias"], [])
    assert torch.equal(backbone.model["backbone"][0].weight, trainer.model[0].weight)
    (tmp_path / "bad.safetensors").write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="bad.safetensors is no safetensors file, or a damaged one"):
        trainer.load_weights(tmp_path / "bad.safetensors")
    with pytest.raises(FileNotFoundError, match="none.safetensors does not exist"):
        trainer.load_weights(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="the weights .* could not be written: .*Is a directory"):
        trainer.save_weights(tmp_path)


def test_renaming() -> None:
    weights: dict[str, Tensor] = {name: torch.zeros(1) for name in ("a.b.w", "a.w", "w")}

    def names(mapping: Any) -> list[str]:
        return list(renamed(weights, mapping))

    assert names(None) == ["a.b.w", "a.w", "w"]
    assert names({"a.": "x.", "a.b.": "y."}) == ["y.w", "x.w", "w"]
    assert names({"": "m."}) == ["m.a.b.w", "m.a.w", "m.w"]
    assert names({"w": "v"}) == ["a.b.w", "a.w", "v"]
    assert names(lambda name: name.upper() if "b" in name else None) == ["A.B.W"]
    with pytest.raises(ValueError, match="gives two of the saved weights the name 'w'; the second one is 'w'"):
        names({"a.": ""})


def test_a_damaged_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    path = tmp_path / "w.safetensors"
    trainer.save_weights(path)
    before = path.read_bytes()

    def fail(*arguments: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("xlatrainer.trainer.weight_files.write_weights", fail)
    with pytest.raises(CheckpointError, match="could not be written: no space left on device"):
        trainer.save_weights(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
