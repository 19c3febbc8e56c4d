"""Checkpoints that several processes write: two writers, each with half of this process's eight devices."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from tests.distributed.launching import launch_soon
from tests.trainer import saving_processes
from tests.trainer.saving_processes import RESUMED_FROM
from tests.trainer.test_resume_elsewhere import OPTIONS, batches, trainer_with, undisturbed
from xlatrainer.backend.transfer import Part, hold_parts
from xlatrainer.callbacks.backup_and_restore import BackupAndRestore
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.model_checkpoint import ModelCheckpoint
from xlatrainer.cli.main import main
from xlatrainer.distributed import Mesh, mark_sharding
from xlatrainer.errors import CheckpointError
from xlatrainer.strategies import FSDPStrategy
from xlatrainer.trainer import consolidate
from xlatrainer.trainer.checkpoint import collect_share, read
from xlatrainer.trainer.checkpoints import files, parts
from xlatrainer.trainer.checkpoints.files import Share, read_checkpoint, read_manifest, write_share
from xlatrainer.trainer.checkpoints.folder import CheckpointFolder
from xlatrainer.trainer.checkpoints.places import place_of
from xlatrainer.trainer.weight_files import read_weight_files


class Writer:
    """One of several that are threads of this process, with some of its devices."""

    def __init__(self, index: int, devices: Collection[int], texts: list[str], barrier: threading.Barrier) -> None:
        self.index = index
        self.count = len(texts)
        self.devices = devices
        self._texts = texts
        self._barrier = barrier

    def owns(self, device: Any) -> bool:
        return device.id in self.devices

    def gather(self, text: str) -> list[str]:
        self._texts[self.index] = text
        self._barrier.wait(60)
        found = list(self._texts)
        self._barrier.wait(60)
        return found


def writers(count: int = 2) -> list[Writer]:
    texts, barrier, each = [""] * count, threading.Barrier(count), 8 // count
    return [Writer(i, range(i * each, (i + 1) * each), texts, barrier) for i in range(count)]


def at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run each on a thread of its own; returns results, or the exceptions."""
    results: list[Any] = [None] * len(jobs)

    def run(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except Exception as error:  # noqa: BLE001 - asserted by the caller
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def share_of(writer: Writer, value: float = 1.0, is_finite: bool = True) -> Share:
    """Rows of `w` and `z`, all of `b` from the first one."""
    half = 4 * writer.index
    w = (torch.arange(16.0).view(8, 2) * value)[half : half + 4]
    z = torch.full((2,), 1j * value, dtype=torch.complex128)
    weights = {
        "w": [Part((half, 0), w[:2]), Part((half + 2, 0), w[2:])],
        "z": [Part((2 * writer.index,), z)],
        "b": [] if writer.index else [Part((3 * 0,), torch.tensor([True, False, True]))],
        "count": [] if writer.index else [Part((), torch.tensor(7))],
    }
    state = {"answer": 42, "held": {"__type__": "tensor", "value": 0}, "values": {"sum": 1}}
    local = {"progress": {"done": writer.index}, "random": {"__type__": "tensor", "value": 1}}
    tensors = [[Part((half,), torch.arange(4.0) + half)]]
    about = {"saved": value, "run": "mine"}
    return Share(weights, {"v": "w"}, state, tensors, about, local, [torch.tensor([writer.index])], is_finite)


def write(path: Any, value: float = 1.0, **options: Any) -> list[Any]:
    return at_once([partial(write_share, path, share_of(w, value, **options), w) for w in writers()])


@pytest.fixture(params=["local", "url"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "new" / "state") if request.param == "local" else f"memory://{tmp_path.name}/share"


def test_a_round_trip(path: str) -> None:
    assert write(path) == [None, None]
    write(path, 2.0)
    found = read_checkpoint(path)
    assert found.weights.keys() == {"w", "z", "b", "count"}
    assert torch.equal(found.weights["w"], 2 * torch.arange(16.0).view(8, 2))
    assert torch.equal(found.weights["z"], torch.full((4,), 2j, dtype=torch.complex128))
    assert torch.equal(found.weights["b"], torch.tensor([True, False, True]))
    assert torch.equal(found.weights["count"], torch.tensor(7))
    assert found.tied == {"v": "w"}
    assert found.about == {"saved": 2.0, "run": "mine", "finite": True, "processes": 2}
    state = found.decoded()
    assert torch.equal(state["held"], torch.arange(8.0))
    # threads that read a file of fsspec's memory share a place in it
    readers = writers() if "://" not in path else [None]
    for index, own in enumerate(at_once([partial(read_checkpoint, path, reader) for reader in readers])):
        assert own.decoded()["progress"] == {"done": index, "values": {"sum": 1}}
        assert own.decoded()["random"].tolist() == [index]
    write(path, is_finite=False)
    assert not read_manifest(path)["finite"]
    place_of(path).remove()
    with pytest.raises(FileNotFoundError):
        read_checkpoint(path)


FILES = {
    *(f"model-0000{i}-of-00002-{part}.safetensors" for i in range(2) for part in range(2)),
    *(f"state-0000{i}-of-00002-0.safetensors" for i in range(2)),
    *(f"local-0000{i}-of-00002.{kind}" for i in range(2) for kind in ("json", "safetensors")),
    *("state.json", "manifest.json"),
}


def test_the_folder_appears_when_all_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    rename = os.rename

    def noted(source: Any, target: Any) -> None:
        seen.append({path.name for path in Path(source).iterdir()})
        rename(source, target)

    monkeypatch.setattr(os, "rename", noted)
    write(tmp_path / "state")
    assert seen == [FILES]
    listed = json.loads((tmp_path / "state" / "manifest.json").read_text())["files"]
    assert set(listed) == FILES - {"manifest.json"}
    assert all(about["size"] == (tmp_path / "state" / name).stat().st_size for name, about in listed.items())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("module", "function", "call"), [(parts, "save_file", 3), (files, "write_manifest", 0), (os, "rename", 1)]
)
def test_killed_while_a_checkpoint_is_replaced(module: Any, function: str, call: int, tmp_path: Path) -> None:
    """In the midst of the parts, before the manifest, and between the two renames."""
    folder = CheckpointFolder(tmp_path)
    write(folder.path_of(1))
    original = getattr(module, function)
    calls = itertools.count()

    def die(*arguments: Any) -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*arguments)

    child = os.fork()
    if not child:
        try:
            setattr(module, function, die)
            write(folder.path_of(1), 2.0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    folder.clean("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert read_checkpoint(folder.path_of(1)).about["saved"] == 1.0
    write(folder.path_of(1), 3.0)
    assert read_checkpoint(folder.path_of(1)).about["saved"] == 3.0


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_is_an_error_of_all(failing: int, path: str) -> None:
    write(path)
    team = writers()
    shares = [share_of(writer, 2.0) for writer in team]
    shares[failing].local["progress"] = float("nan")  # which JSON does not have
    errors = at_once([partial(write_share, path, share, w) for share, w in zip(shares, team, strict=True)])
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert f"could not be written: process {failing}: ValueError: " in str(error)
    if "://" in path:
        with pytest.raises(FileNotFoundError):
            read_checkpoint(path)
        return
    assert read_manifest(path)["saved"] == 1.0
    assert [entry.name for entry in Path(path).parent.iterdir()] == ["state"]  # nothing half-written


def test_a_disk_that_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    jobs = [
        partial(write_share, tmp_path / name / "state", share_of(w), w)
        for name, w in zip(("one", "other"), writers(), strict=True)
    ]
    for error in at_once(jobs):
        assert "process 1: it does not see the folder that the first process has made" in str(error)
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("name", sorted(FILES))
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    write(tmp_path / "state")
    data = bytearray((tmp_path / "state" / name).read_bytes())
    data[-2] ^= 1
    (tmp_path / "state" / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        read_checkpoint(tmp_path / "state")
    if name != "manifest.json":
        for error in at_once([partial(read_checkpoint, tmp_path / "state", w) for w in writers()]):
            assert f"{name} is damaged" in str(error)


def test_a_part_that_is_missing(tmp_path: Path) -> None:
    """With a manifest that does not list it either."""
    team = writers()
    shares = [share_of(writer) for writer in team]
    shares[0].weights["w"].pop()
    at_once([partial(write_share, tmp_path / "state", share, w) for share, w in zip(shares, team, strict=True)])
    with pytest.raises(CheckpointError, match="the 3 parts of w are not the whole of it"):
        read_checkpoint(tmp_path / "state")


def test_torch_reads_the_weights(tmp_path: Path) -> None:
    write(tmp_path / "state")
    found = {"w": torch.zeros(8, 2), "b": torch.zeros(3, dtype=torch.bool)}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "state")))
    assert torch.equal(found["w"], torch.arange(16.0).view(8, 2))
    assert found["b"].tolist() == [True, False, True]


def test_consolidated(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(path, 3.0)
    consolidate(path, tmp_path / "one.safetensors")
    assert capsys.readouterr() == ("", "")
    assert main(["consolidate", path, str(tmp_path / "two.safetensors")]) == 0
    assert "check: 100%" in capsys.readouterr().err
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    expected = read_checkpoint(path)
    stored = load_file(tmp_path / "one.safetensors")
    assert torch.equal(torch.view_as_complex(stored.pop("z")), expected.weights["z"])
    assert stored.keys() == {"w", "b", "count"}
    assert all(torch.equal(stored[name], expected.weights[name]) for name in stored)
    for source in (path, tmp_path / "one.safetensors"):
        weights, tied = read_weight_files(source)
        assert tied == {"v": "w"}
        assert weights.keys() == expected.weights.keys()
        assert all(torch.equal(weights[name], expected.weights[name]) for name in weights)


def test_consolidating_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "state")
    cases = {
        ("state", "."): "is a folder; give the name of a file in it",
        ("nothing", "x.safetensors"): "does not exist",
        (".", "x.safetensors"): "is no checkpoint: it has no manifest.json",
        ("state", "state/manifest.json/x"): "could not be written",
    }
    for (checkpoint, output), message in cases.items():
        assert main(["consolidate", str(tmp_path / checkpoint), str(tmp_path / output), "--quiet"]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "state" / "model-00001-of-00002-1.safetensors").unlink()
    assert main(["consolidate", str(tmp_path / "state"), str(tmp_path / "x.safetensors")]) == 1
    assert "model-00001-of-00002-1.safetensors is missing" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


SPECS = {
    "rows over all": ((8,), ("x",), ("x", None)),
    "whole": ((8,), ("x",), (None, None)),
    "a grid": ((2, 4), ("x", "y"), ("x", "y")),
    "columns within a writer": ((2, 4), ("x", "y"), (None, "y")),
    "columns across writers": ((4, 2), ("x", "y"), (None, "x")),
}


@pytest.mark.parametrize("name", SPECS)
def test_each_element_is_in_one_part(name: str) -> None:
    shape, axes, spec = SPECS[name]
    whole = torch.arange(64.0).view(8, 8)
    tensor = whole.to("xla")
    mark_sharding(tensor, Mesh(range(8), shape, axes), spec)
    found = [hold_parts([tensor, whole[0]], w.owns, is_first=w.index == 0)() for w in writers()]
    tensor.zero_()  # what is held stays
    seen = torch.zeros(8, 8)
    pieces = [part for own in found for part in own[0]]
    for part in pieces:
        box = tuple(slice(b, b + size) for b, size in zip(part.offsets, part.tensor.shape, strict=True))
        assert torch.equal(part.tensor, whole[box])
        seen[box] += 1
    assert torch.equal(seen, torch.ones(8, 8))
    assert [len(own[1]) for own in found] == [1, 0]
    assert len(pieces) == {"whole": 1, "columns within a writer": 4, "columns across writers": 4}.get(name, 8)


@pytest.mark.parametrize("devices", [2, 8])
def test_a_training_goes_on_from_it(devices: int, tmp_path: Path) -> None:
    """Two writers have saved in the middle of an epoch, while the training went on; one process resumes."""
    options = OPTIONS["adamw"]
    trainer, losses = trainer_with("fsdp", options)
    collected: list[Callable[[], Share]] = []

    def save(batch: int, logs: Any) -> None:
        if trainer.step == 5:
            saver = trainer.saver
            collected.extend(collect_share(trainer, saver.progress, "mine", w) for w in writers())

    trainer.fit(batches(), epochs=2, verbose=0, callbacks=[LambdaCallback(on_train_batch_end=save)])
    expected = undisturbed("adamw")
    assert losses == pytest.approx(expected, rel=1e-6)
    folder = tmp_path / "state"
    team = writers()
    shares = [collect() for collect in collected]
    at_once([partial(write_share, folder, share, w) for share, w in zip(shares, team, strict=True)])
    assert own_bytes(shares[0].weights) <= 0.6 * sum(own_bytes(share.weights) for share in shares)
    resumed, more = trainer_with(FSDPStrategy(devices), options)
    resumed.fit(batches(), epochs=2, verbose=0, resume_from=folder)
    assert more == pytest.approx(expected[5:], rel=1e-4)
    saved = read(folder)
    assert saved.in_epoch
    assert saved.tied == {"6.weight": "4.weight"}


def own_bytes(weights: dict[str, list[Part]]) -> int:
    return sum(part.tensor.nbytes for found in weights.values() for part in found)


@pytest.mark.parametrize("callback", [ModelCheckpoint, BackupAndRestore])
def test_callbacks_of_several_processes_have_no_common_clock(
    callback: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trainer_with(FSDPStrategy(), {})
    monkeypatch.setattr(type(trainer.strategy), "process", property(lambda self: (0, 2)))
    with pytest.raises(ValueError, match="2 processes train together and would not find the same step by the clock"):
        trainer.fit(batches(), verbose=0, callbacks=[callback(tmp_path / "state", save_freq="10 minutes")])


@pytest.mark.multiprocess
def test_two_processes(tmp_path: Path) -> None:
    """They save in the background and resume; then one process does."""
    launch_soon(saving_processes.train, tmp_path, devices=4)
    expected = undisturbed("adamw")
    for index in range(2):
        losses, resumed = json.loads((tmp_path / f"losses{index}").read_text())
        assert losses == pytest.approx(expected, rel=1e-5)
        assert resumed == pytest.approx(expected[RESUMED_FROM:], rel=1e-5)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000006", "step_00000008"]
    trainer, losses = trainer_with(FSDPStrategy(2), OPTIONS["adamw"])
    folder = tmp_path / "checkpoints" / f"step_{RESUMED_FROM:08d}"
    trainer.fit(batches(), epochs=2, verbose=0, resume_from=folder)
    assert losses == pytest.approx(expected[RESUMED_FROM:], rel=1e-4)
