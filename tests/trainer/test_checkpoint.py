"""save and load: a training that goes on where it stopped, on any device, and files that other programs read."""

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.trainer.helpers import DEVICES, ON_CPU, class_batches, classifier, strategy_on
from xlatrainer.callbacks.callback import Callback
from xlatrainer.errors import CheckpointError
from xlatrainer.trainer.checkpoints import parts
from xlatrainer.trainer.trainer import Trainer

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "rmsprop": "rmsprop",
}


@pytest.mark.parametrize("loading", DEVICES)
@pytest.mark.parametrize("saving", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_training_continues_the_same_curve(name: str, saving: str, loading: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    whole = Trainer(classifier(), OPTIMIZERS[name], strategy=strategy_on(loading))
    expected = whole.fit(class_batches(), epochs=4, verbose=0).history["loss"]
    first = Trainer(classifier(), OPTIMIZERS[name], strategy=strategy_on(saving))
    first.fit(class_batches(), epochs=2, verbose=0)
    first.save(path)
    second = Trainer(classifier(seed=9), OPTIMIZERS[name], strategy=strategy_on(loading))
    assert second.load(path) == ([], [])
    assert (second.epoch, second.step, second.num_examples) == (2, 14, 200)
    history = second.fit(class_batches(), epochs=4, initial_epoch=second.epoch, verbose=0)
    assert history.epoch == [2, 3]
    if saving == loading:
        assert history.history["loss"] == expected[2:]
    else:
        assert history.history["loss"] == pytest.approx(expected[2:], abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_plain_torch_reads_the_weights(device: str, tmp_path: Path) -> None:
    trainer = Trainer(classifier(), "adam", strategy=strategy_on(device))
    trainer.fit(class_batches(), verbose=0)
    trainer.save(tmp_path / "state")
    model = classifier(seed=9)
    model.load_state_dict(load_file(tmp_path / "state" / "model.safetensors"))
    inputs = class_batches()[0][0]
    torch.testing.assert_close(model.eval()(inputs), trainer.predict(inputs, verbose=0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_saving_changes_nothing(device: str, async_save: bool, tmp_path: Path) -> None:
    plain, saved = (Trainer(classifier(), "adam", strategy=strategy_on(device)) for _ in range(2))
    expected = plain.fit(class_batches(), epochs=3, verbose=0).history["loss"]
    losses = []
    for _ in range(3):
        losses += saved.fit(class_batches(), verbose=0).history["loss"]
        saved.save(tmp_path / "state", async_save=async_save)
    saved.wait_for_saves()
    assert losses == expected


@pytest.mark.parametrize("url", [False, True])
def test_it_can_be_saved_anywhere(url: bool, tmp_path: Path) -> None:
    path = "memory://runs/new/state" if url else tmp_path / "new" / "folder" / "state"
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    trainer.fit(class_batches(), verbose=0)
    trainer.save(path)
    trainer.fit(class_batches(), verbose=0)
    trainer.save(path)  # replaces the one before
    other = Trainer(classifier(seed=9), "sgd", strategy=ON_CPU)
    other.load(path)
    assert other.step == 14
    assert torch.equal(other.model[0].weight, trainer.model[0].weight)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(1000, 100), nn.Linear(100, 1000, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("device", DEVICES)
def test_tied_weights_are_saved_once_and_stay_tied(device: str, tmp_path: Path) -> None:
    trainer = Trainer(tied(), "sgd", strategy=strategy_on(device))
    trainer.save(tmp_path / "state")
    assert (tmp_path / "state" / "model.safetensors").stat().st_size < 1.5 * 1000 * 100 * 4
    other = Trainer(tied(), "sgd", strategy=strategy_on(device))
    other.load(tmp_path / "state")
    assert other.model[0].weight is other.model[1].weight
    assert torch.equal(other.model[1].weight.cpu(), trainer.model[0].weight.cpu())


def test_a_model_whose_weights_are_not_tied_is_warned_about(tmp_path: Path) -> None:
    Trainer(tied(), "sgd", strategy=ON_CPU).save(tmp_path / "state")
    apart = nn.Sequential(nn.Embedding(1000, 100), nn.Linear(100, 1000, bias=False))
    trainer = Trainer(apart, "sgd", strategy=ON_CPU)
    with pytest.warns(UserWarning, match=r"0.weight and 1.weight are one weight in .*state and two in this model"):
        load_with_same_parameters(trainer, tmp_path / "state")
    assert torch.equal(apart[0].weight, apart[1].weight)


def load_with_same_parameters(trainer: Trainer, path: Path) -> None:
    """The optimizer has a parameter more than the saved one's."""
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        trainer.load(path)


def test_names_can_be_mapped_and_left_out(tmp_path: Path) -> None:
    first = Trainer(nn.ModuleDict({"encoder": nn.Linear(3, 3)}), "sgd", strategy=ON_CPU)
    first.save(tmp_path / "state")
    second = Trainer(nn.ModuleDict({"backbone": nn.Linear(3, 3)}), "sgd", strategy=ON_CPU)
    second.load(tmp_path / "state", map={"encoder.": "backbone."})
    assert torch.equal(second.model["backbone"].weight, first.model["encoder"].weight)
    third = Trainer(nn.ModuleDict({"head": nn.Linear(3, 3)}), "sgd", strategy=ON_CPU)
    with pytest.raises(RuntimeError, match="Missing key"):
        third.load(tmp_path / "state")
    loaded = third.load(tmp_path / "state", strict=False)
    assert loaded.missing_keys == ["head.weight", "head.bias"]
    assert sorted(loaded.unexpected_keys) == ["encoder.bias", "encoder.weight"]


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    path = tmp_path / "state"
    trainer.save(path)
    before = contents(path)

    def fail(tensors: Any, filename: Path, metadata: Any) -> None:
        filename.write_bytes(b"half of")
        raise OSError("no space left on device")

    monkeypatch.setattr(parts, "save_file", fail)
    with pytest.raises(CheckpointError, match=r"state could not be written: no space left .* as it was"):
        trainer.save(path)
    assert contents(path) == before
    assert list(tmp_path.iterdir()) == [path]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_extra_state_of_modules_is_saved(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    first, second = (Trainer(Counting(2, 2), "sgd", strategy=ON_CPU) for _ in range(2))
    first.model.calls = 5
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert second.model.calls == 5


def test_no_code_is_executed_on_load(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "executed"),))

    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    torch.save({"format": 1, "model": Malicious()}, tmp_path / "state.pt")
    with pytest.raises(pickle.UnpicklingError):
        trainer.load(tmp_path / "state.pt")
    assert not (tmp_path / "executed").exists()


def test_what_only_code_could_read_back_is_not_saved(tmp_path: Path) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    trainer.optimizer.param_groups[0]["schedule"] = print
    with pytest.raises(TypeError, match=r"optimizer\['param_groups'\]\[0\]\['schedule'\] is a builtin_function"):
        trainer.save(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_format_1_is_read(tmp_path: Path) -> None:
    trainer = Trainer(classifier(), OPTIMIZERS["sgd"], strategy=ON_CPU)
    expected = trainer.fit(class_batches(), epochs=4, verbose=0).history["loss"]
    trainer = Trainer(classifier(), OPTIMIZERS["sgd"], strategy=ON_CPU)
    trainer.fit(class_batches(), epochs=2, verbose=0)
    state = {
        "format": 1,
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "optimizer_class": "SGD",
        "counters": {"epoch": 2, "step": 14, "num_examples": 200},
    }
    torch.save(state, tmp_path / "state.pt")
    loaded = Trainer(classifier(seed=9), OPTIMIZERS["sgd"], strategy=ON_CPU)
    loaded.load(tmp_path / "state.pt")
    history = loaded.fit(class_batches(), epochs=4, initial_epoch=loaded.epoch, verbose=0)
    assert history.history["loss"] == expected[2:]
    resumed = Trainer(classifier(seed=9), OPTIMIZERS["sgd"], strategy=ON_CPU)
    with pytest.warns(UserWarning, match="no state for callback.History|format 1, without random states"):
        history = resumed.fit(class_batches(), epochs=4, resume_from=tmp_path / "state.pt", verbose=0)
    assert history.history["loss"] == expected[2:]


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    torch.save(classifier().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"weights.pt was not written by Trainer.save"):
        trainer.load(tmp_path / "weights.pt")
    torch.save({"format": 99}, tmp_path / "later.pt")
    with pytest.raises(ValueError, match="has format 99, which no xlatrainer wrote into a single file"):
        trainer.load(tmp_path / "later.pt")
    Trainer(classifier(), "adam", strategy=ON_CPU).save(tmp_path / "adam")
    with pytest.raises(ValueError, match="saved with the optimizer Adam, this Trainer has SGD"):
        trainer.load(tmp_path / "adam")
    Trainer(nn.Linear(2, 2), "sgd", strategy=ON_CPU).save(tmp_path / "other")
    with pytest.raises(RuntimeError, match="size mismatch|Missing key"):
        trainer.load(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        trainer.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="is no checkpoint: it has no manifest.json"):
        trainer.load(tmp_path)
    with pytest.raises(FileExistsError, match="is a folder that holds something else"):
        trainer.save(tmp_path)


def test_what_is_saved_in_the_background_is_as_it_was_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is held up until the next epoch has changed everything."""
    started: list[Any] = []
    for device in DEVICES:
        trainer = Trainer(classifier(), "adam", strategy=strategy_on(device))
        trainer.fit(class_batches(), verbose=0)
        expected = {name: value.cpu().clone() for name, value in trainer.model.state_dict().items()}
        with monkeypatch.context() as patch:
            patch.setattr(trainer.saver._writer, "start", started.append)
            trainer.save(tmp_path / device, async_save=True)
        trainer.fit(class_batches(), epochs=2, verbose=0)
        started.pop()()
        found = load_file(tmp_path / device / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not torch.equal(found["0.weight"], trainer.model[0].weight.cpu())


def test_numpy_numbers_in_a_callbacks_state(tmp_path: Path) -> None:
    class Best(Callback):
        best: Any = np.float32(0.5)

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best, "all": np.arange(3)}

        def load_state_dict(self, state: Any) -> None:
            self.best, self.all = state["best"], state["all"]

    trainer = Trainer(classifier(), "sgd", callbacks=[Best()], strategy=ON_CPU)
    trainer.save(tmp_path / "state")
    best = Best()
    best.best = None
    Trainer(classifier(), "sgd", callbacks=[best], strategy=ON_CPU).load(tmp_path / "state")
    assert best.best == np.float32(0.5)
    assert best.all.tolist() == [0, 1, 2]
