"""Several processes with two devices each: one mesh, one training, and one end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import xlatrainer as xla
from tests.distributed import scripts
from tests.distributed.launching import launch_soon
from xlatrainer.distributed import launch
from xlatrainer.errors import ProcessesError
from xlatrainer.strategies import DDPStrategy

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def _two_devices_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert xla.device_count() == 8  # of this process, which reads the variable once
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")


with_two_devices = pytest.mark.usefixtures("_two_devices_each")


def results(folder: Path, strategy: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{strategy}-*.json"))]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("bigram", "fsdp"),
        *(
            pytest.param(kind, strategy, marks=pytest.mark.slow)
            for kind in ("cnn", "gpt")
            for strategy in ("ddp", "fsdp", "hsdp", "tensor_parallel")
        ),
    ],
)
def test_two_train_as_one(tmp_path: Path, kind: str, strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    # Not out of a server: what its children print goes where its own output did when it was started.
    launch(scripts.on_devices, (2, scripts.train, kind, strategy, str(tmp_path)), nprocs=2)
    shown = capfd.readouterr().out
    assert shown.count("Epoch 7/7") == 1
    first, second = results(tmp_path, strategy)
    assert first.pop("devices") == ["CPU:0", "CPU:1"]
    assert len(second.pop("devices")) == 2
    assert first == second
    scripts.train(0, kind, "single", str(tmp_path))
    (alone,) = results(tmp_path, "single")
    assert first["examples"] == alone["examples"]
    assert len(first["losses"]) == len(alone["losses"]) == 21
    for name in ("losses", "accuracy", "predicted"):
        assert first[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-3 if name == "predicted" else 0), name
    assert first["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)


@with_two_devices
def test_the_same_script_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    environment = {**os.environ, "FOLDER": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = [str(ROOT / "tests" / "distributed" / "scripts.py")]
    done = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(tmp_path.glob("talk-*.json"))]
    assert told == [[0, [0, 2, 1, [1.5, 2.5]]], [1, [1, 2, 1, [1.5, 2.5]]]]


def test_one_that_dies_ends_the_others() -> None:
    with pytest.raises(ProcessesError, match=r"process 1 of 2 ended by SIGKILL: it was killed"):
        launch_soon(scripts.die)


@with_two_devices
def test_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["xlatrainer.distributed.launch"], "_GRACE", 1.0)  # they wait for one another
    with pytest.raises(ProcessesError, match=r"(?s)process 1 of 2 ended with ValueError.*in fail.*second one cannot"):
        launch(scripts.fail_together, nprocs=2)


@with_two_devices
def test_all_stop_after_the_same_step(tmp_path: Path) -> None:
    launch(scripts.interrupted, (str(tmp_path),), nprocs=2)
    told = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert told["0"] == told["1"]
    assert told["0"].split()[0] == str(128 + signal.SIGTERM)
    assert int(told["0"].split()[1]) < 100


def test_in_this_process() -> None:
    seen: list[Any] = []
    launch(lambda *given: seen.append(given), ("a",))
    launch(lambda *given: seen.append(given), ("b",), nprocs=2, debug_single_process=True)
    assert seen == [(0, "a"), (0, "b")]
    with pytest.raises(ValueError, match="start_method='fork'"):
        launch(scripts.fail, start_method="fork", nprocs=2)
    with pytest.raises(ValueError, match="nprocs must be at least 1"):
        launch(scripts.fail, nprocs=0)


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ValueError, match="devices=99, and there are 8"):
        DDPStrategy(99)


def test_one_alone_is_the_first() -> None:
    assert scripts.process_index() == 0
    assert scripts.process_count() == 1
    assert DDPStrategy().strongest(3) == 3
    tensor = torch.ones(2)
    assert scripts.from_first(tensor) is tensor
    assert xla.device_count() == 8
