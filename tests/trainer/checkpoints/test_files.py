"""Checkpoints on disk: whole or not at all, checked when read, and nobody else's file is touched."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from xlatrainer.errors import CheckpointError
from xlatrainer.storage import publishing
from xlatrainer.trainer.checkpoints.files import Content, read_checkpoint, read_manifest, write_checkpoint
from xlatrainer.trainer.checkpoints.folder import CheckpointFolder
from xlatrainer.trainer.checkpoints.places import FILES, place_of


def content(value: float = 1.0, **about: Any) -> Content:
    weights = {"w": torch.full((3, 2), value), "z": torch.full((2,), value, dtype=torch.complex128)}
    state = {"answer": 42, "values": {"__type__": "tensor", "value": 0}}
    return Content(weights, {"v": "w"}, state, [torch.full((4,), value)], {"saved": value, "run": "mine", **about})


def value_at(path: Any) -> float:
    return float(read_checkpoint(path).weights["w"][0, 0])


@pytest.fixture(params=["local", "url"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path)
    url = f"memory://{tmp_path.name}"
    shutil.rmtree(tmp_path)
    return url


def test_a_round_trip(root: str) -> None:
    path = f"{root}/new/state"
    write_checkpoint(path, content(2.0))
    found = read_checkpoint(path)
    assert found.weights.keys() == {"w", "z"}
    assert torch.equal(found.weights["z"], torch.full((2,), 2.0, dtype=torch.complex128))
    assert found.tied == {"v": "w"}
    assert torch.equal(found.decoded()["values"], torch.full((4,), 2.0))
    assert read_manifest(path) == {"saved": 2.0, "run": "mine"}
    write_checkpoint(path, content(3.0))
    assert value_at(path) == 3.0
    place_of(path).remove()
    with pytest.raises(FileNotFoundError):
        read_checkpoint(path)


def edited(path: Path, change: Any) -> None:
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Any, str]] = {
    "cut off": (
        lambda folder: os.truncate(folder / "model.safetensors", 100),
        r"model.safetensors is damaged: it has 100 bytes, \d+ were written",
    ),
    "a bit": (
        lambda folder: flip(folder / "state.safetensors"),
        r"state.safetensors is damaged: its contents do not have the SHA-256",
    ),
    "missing": (lambda folder: (folder / "state.json").unlink(), r"state.json is missing; the checkpoint is not whole"),
    "no JSON": (
        lambda folder: (folder / "manifest.json").write_text("{"),
        r"manifest.json is damaged: it is no JSON",
    ),
    "an edited manifest": (
        lambda folder: edited(folder / "manifest.json", lambda manifest: manifest["about"].update(step=1)),
        r"manifest.json is damaged: its contents do not have the hash that it states",
    ),
    "a later format": (
        lambda folder: edited(folder / "manifest.json", lambda manifest: manifest.update(format=4)),
        r"has format 4, this xlatrainer reads formats 2 and 3 .* use the xlatrainer that wrote it",
    ),
    "another's manifest": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        r"manifest.json was not written by xlatrainer: it names no format",
    ),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    write_checkpoint(tmp_path / "state", content())
    damage(tmp_path / "state")
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "state")


def test_a_folder_gets_its_name_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[set[str], list[str]]] = []
    rename = os.rename

    def noted(source: Any, target: Any) -> None:
        seen.append(({path.name for path in Path(source).iterdir()}, sorted(path.name for path in tmp_path.iterdir())))
        rename(source, target)

    monkeypatch.setattr(os, "rename", noted)
    write_checkpoint(tmp_path / "state", content())
    ((names, beside),) = seen
    assert names == set(FILES)
    assert len(beside) == 1
    assert beside[0].startswith(".state.")


@pytest.mark.multiprocess
def test_killed_between_the_renames_of_a_replacement(tmp_path: Path) -> None:
    """The old one has lost its name and the new one has not got it: the old one comes back."""
    write_checkpoint(tmp_path / "state", content(1.0))
    rename = os.rename
    done: list[Any] = []

    def die(source: Any, target: Any) -> None:
        if done:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(source)
        rename(source, target)

    child = os.fork()
    if not child:
        try:
            os.rename = die  # type: ignore[attr-defined]
            write_checkpoint(tmp_path / "state", content(2.0))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "state").exists()
    assert len(list(tmp_path.iterdir())) == 2
    assert value_at(tmp_path / "state") == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_what_is_half_written_is_not_seen_and_cleaned_only_if_it_is_ours(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    write_checkpoint(folder.path_of(1), content())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    abandoned = tmp_path / f".step_00000002.{publishing._host()}-{gone.pid}-00000000.writing"
    elsewhere = tmp_path / f".step_00000002.{'0' * 8}-{gone.pid}-00000000.writing"
    living = tmp_path / f".step_00000002.{publishing._host()}-{os.getppid()}-00000000.writing"
    others = tmp_path / "step_00000003"
    for path in (abandoned, elsewhere, living, others):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
        (path / ".tmpA1b2C3").write_bytes(b"what safetensors was writing")
    found = folder.newest()
    assert found is not None
    assert found[0] == folder.path_of(1)
    folder.clean("mine")
    assert not abandoned.exists()
    assert elsewhere.exists()
    assert living.exists()
    assert others.exists()


def test_foreign_files_are_never_deleted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "state", content(1.0))
    (tmp_path / "state" / "config.json").write_text("theirs")
    write_checkpoint(tmp_path / "state", content(2.0))
    assert value_at(tmp_path / "state") == 2.0
    assert (tmp_path / "state" / "config.json").read_text() == "theirs"
    with pytest.raises(FileExistsError, match="is a folder that holds something else than a checkpoint"):
        write_checkpoint(tmp_path, content())
    place_of(tmp_path / "state").remove()
    assert [path.read_text() for path in tmp_path.rglob("config.json")] == ["theirs"]


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("format 1")
    write_checkpoint(tmp_path / "state", content(2.0))
    assert value_at(tmp_path / "state") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_remote_write_that_fails_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "memory://failing/state"
    system = fsspec.filesystem("memory")
    put = type(system).put_file

    def fail(self: Any, source: str, target: str, **options: Any) -> None:
        if source.endswith("state.json"):
            raise OSError("connection lost")
        put(self, source, target, **options)

    monkeypatch.setattr(type(system), "put_file", fail)
    with pytest.raises(CheckpointError, match="memory://failing/state could not be written: connection lost"):
        write_checkpoint(path, content())
    with pytest.raises(FileNotFoundError):
        read_checkpoint(path)


def test_which_ones_are_kept(root: str) -> None:
    folder = CheckpointFolder(f"{root}/checkpoints", max_to_keep=2)
    for step in range(1, 6):
        write_checkpoint(folder.path_of(step), content(step, run="other" if step == 1 else "mine", finite=step < 4))
        folder.clean("mine")
    left = [step for step in range(1, 6) if place_of(folder.path_of(step)).holds_checkpoint()]
    assert left == [1, 3, 4, 5]  # another's; the newest finite one; the two newest
    folder.protected = folder.path_of(4)
    write_checkpoint(folder.path_of(6), content(6, finite=True))
    write_checkpoint(folder.path_of(7), content(7, finite=True))
    folder.clean("mine")
    left = [step for step in range(1, 8) if place_of(folder.path_of(step)).holds_checkpoint()]
    assert left == [1, 4, 6, 7]
    newest = folder.newest()
    assert newest is not None
    assert newest[0] == folder.path_of(7)


def test_no_whole_one_is_an_error(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() is None
    write_checkpoint(folder.path_of(1), content())
    flip(tmp_path / "step_00000001" / "model.safetensors")
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in .*model.safetensors is damaged"):
        folder.newest()
    with pytest.raises(ValueError, match="max_to_keep must be at least 1"):
        CheckpointFolder(tmp_path, 0)
