"""The recipe, run as a user runs it."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from recipes import mnist

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "mnist.py"


def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CPU_NUM_DEVICES": "1"}  # as without the tests' own setting
    return subprocess.run(
        [sys.executable, str(RECIPE), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=check,
        env=environment,
    )


def test_fake_data_and_the_reports(tmp_path: Path) -> None:
    out = run("--fake-data", "--epochs", "2", "--logdir", str(tmp_path), "--device-report", "--lr", "0.01").stdout
    lines = out.splitlines()
    assert lines[0] == "MNISTNet on xla:0, 2,048 digits to train, 512 to test"
    assert any(re.search(r"total +21,900 +parameters", line) for line in lines)
    assert "Epoch 2/2" in out
    assert "real devices: ['CPU:0'" in out
    assert re.search(r"Execute +40$", out, re.MULTILINE)  # 16 batches to train and 4 to test, twice
    assert re.fullmatch(r"examples/s: [\d,]+", lines[-3])
    assert lines[-2] == "compilations: 2"  # the training step, the test batches
    assert re.fullmatch(r"test accuracy: \d+\.\d\d%", lines[-1])
    assert (tmp_path / "scalars.csv").read_text().count("\n") == 3


def test_a_cache_of_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(mnist, "fake_digits", partial(mnist.fake_digits, 128, 64))
    arguments = ["--fake-data", "--epochs", "1", "--batch-size", "64", "--dscache_dir", str(tmp_path)]
    first = mnist.main(arguments)
    assert len(list((tmp_path / "train").rglob("*.sample"))) == 128
    assert len(list((tmp_path / "test").rglob("*.sample"))) == 64
    written = max(path.stat().st_mtime_ns for path in tmp_path.rglob("*.sample"))
    assert len(re.findall("^(MNISTNet on|  total|examples/s:|test accuracy:)", capsys.readouterr().out, re.M)) == 4
    monkeypatch.setattr(mnist, "is_first", lambda: False)  # as in further processes of one training
    assert mnist.main([*arguments, "--device-report"]) == first
    assert not re.search("MNISTNet|total|devices|examples/s:|accuracy: .*%", capsys.readouterr().out)
    assert max(path.stat().st_mtime_ns for path in tmp_path.rglob("*.sample")) == written


@pytest.mark.slow
def test_five_epochs_reach_97_percent_and_repeat() -> None:
    last_lines = [run().stdout.splitlines()[-2:] for _ in range(2)]
    assert last_lines[0] == last_lines[1]
    compilations, accuracy = last_lines[0]
    assert compilations == "compilations: 4"  # and a short last batch of each
    assert float(accuracy.removeprefix("test accuracy: ").removesuffix("%")) >= 97.0


def test_download_without_torchvision_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"--download needs torchvision: pip install 'xlatrainer\[vision\]'"):
        mnist.main(["--download"])


def test_the_digits_that_ship() -> None:
    train, test = mnist.shipped_digits()
    assert (train.images.shape, test.images.shape) == ((8000, 1, 28, 28), (2000, 1, 28, 28))
    assert train.labels.unique().tolist() == test.labels.unique().tolist() == list(range(10))
    assert abs(train.images.mean()) < 0.02
    assert abs(train.images.std() - 1) < 0.02


def test_batches_are_shuffled_by_their_generator_alone() -> None:
    digits = mnist.Digits(torch.arange(10.0), torch.arange(10))
    orders = []
    for _ in range(2):
        batches = mnist.Batches(digits, 4, torch.Generator().manual_seed(7))
        orders.append([torch.cat([labels for _, labels in batches]).tolist() for _ in range(2)])
        torch.rand(3)
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == list(range(10))
    assert [len(labels) for _, labels in mnist.Batches(digits, 4)] == [4, 4, 2]
    assert len(mnist.Batches(digits, 4)) == 3


def test_over_several_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    digits = tuple(
        mnist.Digits(part.images[:count], part.labels[:count])
        for part, count in zip(mnist.shipped_digits(), (512, 100), strict=True)
    )
    monkeypatch.setattr(mnist, "shipped_digits", lambda: digits)
    losses = []
    for strategy in ("single", "fsdp"):
        accuracy = mnist.main(["--epochs=2", "--batch-size=64", f"--strategy={strategy}"])
        assert accuracy > 0.5
        out = capsys.readouterr().out
        assert ("FSDPStrategy, 8 devices" in out) == (strategy == "fsdp")
        losses.append([float(loss) for loss in re.findall(r" loss: ([\d.]+)", out)])
    assert losses[0][1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
