"""save and load: a training that goes on where it stopped, on any device, and a file that is never half."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.helpers import DEVICES, ON_CPU, class_batches, classifier, strategy_on
from xlatrainer.trainer import checkpoint
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
    path = tmp_path / "state.pt"
    whole = Trainer(classifier(), OPTIMIZERS[name], strategy=strategy_on(loading))
    expected = whole.fit(class_batches(), epochs=4, verbose=0).history["loss"]
    first = Trainer(classifier(), OPTIMIZERS[name], strategy=strategy_on(saving))
    first.fit(class_batches(), epochs=2, verbose=0)
    first.save(path)
    second = Trainer(classifier(seed=9), OPTIMIZERS[name], strategy=strategy_on(loading))
    second.load(path)
    assert (second.epoch, second.step, second.num_examples) == (2, 14, 200)
    history = second.fit(class_batches(), epochs=4, initial_epoch=second.epoch, verbose=0)
    assert history.epoch == [2, 3]
    if saving == loading:
        assert history.history["loss"] == expected[2:]
    else:
        assert history.history["loss"] == pytest.approx(expected[2:], abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_plain_torch_reads_the_file(device: str, tmp_path: Path) -> None:
    trainer = Trainer(classifier(), "adam", strategy=strategy_on(device))
    trainer.fit(class_batches(), verbose=0)
    trainer.save(tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model = classifier(seed=9)
    model.load_state_dict(state["model"])
    inputs = class_batches()[0][0]
    torch.testing.assert_close(model.eval()(inputs), trainer.predict(inputs, verbose=0), atol=1e-5, rtol=1e-5)
    assert all(value.device.type == "cpu" for value in state["model"].values())


@pytest.mark.parametrize("device", DEVICES)
def test_saving_changes_nothing(device: str, tmp_path: Path) -> None:
    plain, saved = (Trainer(classifier(), "adam", strategy=strategy_on(device)) for _ in range(2))
    expected = plain.fit(class_batches(), epochs=3, verbose=0).history["loss"]
    losses = []
    for _ in range(3):
        losses += saved.fit(class_batches(), verbose=0).history["loss"]
        saved.save(tmp_path / "state.pt")
    assert losses == expected


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    trainer = Trainer(tied(), "sgd", strategy=ON_CPU)
    trainer.save(tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 1.5 * 1000 * 100 * 4
    trainer.load(tmp_path / "state.pt")
    assert trainer.model[0].weight is trainer.model[1].weight


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(1000, 100), nn.Linear(100, 1000, bias=False))
    model[1].weight = model[0].weight
    return model


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    path = tmp_path / "state.pt"
    trainer.save(path)
    before = path.read_bytes()

    def fail(state: Any, file: Any) -> None:
        file.write(b"half of")
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        trainer.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


SAVE_FOR_EVER = textwrap.dedent(
    """
    import sys
    import torch
    from xlatrainer.trainer.checkpoint import write_checkpoint

    value = 0
    while True:
        value += 1
        write_checkpoint({"format": 1, "values": [torch.full((100_000,), float(value)) for _ in range(5)]}, sys.argv[1])
        print(value, flush=True)
    """
)


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    for attempt in range(5):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.011 * (attempt + 1))
        process.send_signal(signal.SIGKILL)
        written = [int(line) for line in process.stdout.read().split("\n")[:-1] if line]
        process.stdout.close()
        process.wait()
        values = torch.cat(checkpoint.read_checkpoint(path)["values"]).unique().tolist()
        assert len(values) == 1
        assert values[0] >= max(written, default=1)


def test_the_temporary_file_is_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = []
    replace = os.replace
    monkeypatch.setattr(checkpoint.os, "replace", lambda a, b: (renamed.append((a, b)), replace(a, b)))
    checkpoint.write_checkpoint({"format": 1}, str(tmp_path / "state.pt"))
    ((source, target),) = renamed
    assert (source.parent, target) == (tmp_path, tmp_path / "state.pt")


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
        trainer.save(tmp_path / "state.pt")
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    torch.save(classifier().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"weights.pt was not written by Trainer.save"):
        trainer.load(tmp_path / "weights.pt")
    torch.save({"format": 99}, tmp_path / "later.pt")
    with pytest.raises(ValueError, match="has format 99, this xlatrainer reads format 1"):
        trainer.load(tmp_path / "later.pt")
    Trainer(classifier(), "adam", strategy=ON_CPU).save(tmp_path / "adam.pt")
    with pytest.raises(ValueError, match="saved with the optimizer Adam, this Trainer has SGD"):
        trainer.load(tmp_path / "adam.pt")
    Trainer(nn.Linear(2, 2), "sgd", strategy=ON_CPU).save(tmp_path / "other.pt")
    with pytest.raises(RuntimeError, match="size mismatch|Missing key"):
        trainer.load(tmp_path / "other.pt")
    with pytest.raises(FileNotFoundError):
        trainer.load(tmp_path / "none.pt")
