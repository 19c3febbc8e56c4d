"""A training that is killed at random moments has the losses of one that is not, and no checkpoint is ever damaged."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer.killed_training import train
from xlatrainer.trainer.checkpoints.files import read_checkpoint
from xlatrainer.trainer.interruption import EXIT_CODE

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 180.0  # seconds for what takes a few; only a hang gets there


def losses_in(folder: Path) -> list[tuple[int, str]]:
    """Steps and losses, as whole lines of the record."""
    if not (folder / "losses").exists():
        return []
    lines = (folder / "losses").read_text().split("\n")[:-1]
    return [(int(line.split()[0]), line.split()[1]) for line in lines if line != "done"]


def start(folder: Path, steps: int, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.trainer.killed_training", str(folder), str(steps), str(workers)]
    environment = {**os.environ, "XLATRAINER_CACHE_DIR": str(folder / "programs"), "PYTHONPATH": str(ROOT)}
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)


def stop_at_a_random_moment(process: subprocess.Popen[bytes], folder: Path, number: signal.Signals) -> None:
    """Some time after the process has recorded its first step, with SIGKILL or SIGTERM."""
    recorded = len(losses_in(folder))
    deadline = time.monotonic() + DEADLINE
    while process.poll() is None and len(losses_in(folder)) == recorded and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(random.random() * 0.4)
    assert process.poll() is None, (folder / "output").read_text()
    process.send_signal(number)
    assert process.wait(DEADLINE) == (-number if number == signal.SIGKILL else EXIT_CODE)


def check_checkpoints(folder: Path) -> list[int]:
    """Read all there are; returns their steps."""
    saved = sorted(path for path in (folder / "checkpoints").glob("step_*"))
    return [int(read_checkpoint(path).about["step"]) for path in saved]


def survive(tmp_path: Path, kills: int, steps: int, workers: int, preempted: bool = False) -> None:
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    train(undisturbed, steps, workers, seconds=0.0)
    expected = losses_in(undisturbed)
    assert [step for step, _ in expected] == list(range(1, steps + 1))
    folder = tmp_path / "killed"
    folder.mkdir()
    resumed = 0
    for _ in range(kills):
        before = check_checkpoints(folder)
        process = start(folder, steps, workers)
        recorded = len(losses_in(folder))
        stop_at_a_random_moment(process, folder, signal.SIGKILL)
        first_step = losses_in(folder)[recorded][0]
        assert first_step == (max(before) + 1 if before else 1)  # it went on from the newest one
        resumed += first_step > 1
    assert resumed >= kills - 1
    if preempted:
        stop_at_a_random_moment(start(folder, steps, workers), folder, signal.SIGTERM)
        assert max(check_checkpoints(folder)) == losses_in(folder)[-1][0]  # not a step is lost
    process = start(folder, steps, workers)
    assert process.wait(DEADLINE) == 0, (folder / "output").read_text()
    curve: dict[int, str] = dict(expected)
    recorded_losses = losses_in(folder)
    assert all(curve[step] == loss for step, loss in recorded_losses)
    assert {step for step, _ in recorded_losses} == set(curve)
    assert max(check_checkpoints(folder)) == steps
    left = [path.name for path in (folder / "checkpoints").iterdir()]
    assert len(left) == 3, left  # the rest, what was half-written included, is gone
    print(f"{kills} kills, {len(recorded_losses)} steps made for {steps}, {resumed} restarts went on from a checkpoint")


@pytest.mark.multiprocess
def test_killed_twice(tmp_path: Path) -> None:
    survive(tmp_path, kills=2, steps=130, workers=0)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_killed_twenty_times(tmp_path: Path) -> None:
    survive(tmp_path, kills=20, steps=900, workers=2, preempted=True)
