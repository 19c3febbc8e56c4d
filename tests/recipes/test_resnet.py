"""The recipe for ImageNet: its flags, its schedule, and trainings on noise and on a folder of small images."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import xlatrainer as xla
from recipes import resnet
from tests.data.test_images import make_folder, make_records

pytest.importorskip("torchvision")

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "resnet.py"
SMALL = ["--image_size=16", "--batch_size=4", "--test_set_batch_size=4", "--num_workers=0", "--log_steps=1"]


def small_model(name: str, num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, num_classes))


def test_the_flags_of_the_scripts_are_accepted() -> None:
    flags = (
        "--datadir=D --drop_last --model=resnet50 --test_set_batch_size=64 --eval_interval=10 --lr=0.4 --batch_size=9 "
        "--num_warmup_epochs=5 --lr_scheduler_divide_every_n_epochs=30 --lr_scheduler_divisor=10 --num_epochs=100"
    )
    options = resnet.parse_arguments(flags.split())
    assert (options.datadir, options.lr, options.num_epochs, options.drop_last) == ("D", 0.4, 100, True)
    assert resnet.make_schedule(options, 10) is not None
    defaults = resnet.parse_arguments(["--fake_data", "--batch_size=256", "--num_epochs=1"])
    assert (defaults.batch_size, defaults.model, defaults.test_set_batch_size) == (256, "resnet50", 64)
    assert resnet.make_schedule(defaults, 10) is None
    assert defaults.strategy == "single"
    assert resnet.parse_arguments(["--ddp"]).strategy == "ddp"


def test_the_schedule() -> None:
    factor = resnet.warmup_and_decay(10, 0.9, 2, 5.0)
    assert [factor(step) for step in (0, 8, 9, 19)] == [pytest.approx(1 / 9), 1, 1, 1]
    assert [factor(step) for step in (20, 39, 40)] == [pytest.approx(x) for x in (0.2, 0.2, 0.04)]
    assert resnet.warmup_and_decay(10, 0, 1, 2.0)(0) == 1


@pytest.mark.parametrize("make", [make_folder, make_records])
def test_a_training_on_images(
    make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(make)
    make(tmp_path)
    monkeypatch.setattr(resnet, "make_model", small_model)
    logs = tmp_path / "logs"
    arguments = [
        *SMALL,
        f"--datadir={tmp_path}",
        f"--logdir={logs}",
        "--num_epochs=2",
        "--num_warmup_epochs=1",
        "--ddp",
        "--drop_last",
    ]
    accuracy = resnet.main(arguments)
    assert 0 <= accuracy <= 100
    out = capsys.readouterr().out
    line = r"\| Training Device=xla:0/0 Epoch=2 Step=0 Loss=\d+\.\d{5} Rate=\S+ GlobalRate=\S+ Time=\d\d:\d\d:\d\d"
    assert re.search(line, out)
    assert f"Max Accuracy: {accuracy:.2f}%" in out
    assert (logs / "scalars.csv").read_text().count("\n") == 3
    resnet.main([*arguments, "--tidy", "--test_only_at_end", "--metrics_debug"])
    assert "CompileTime" in capsys.readouterr().out
    assert not logs.exists()


def test_the_accuracy_decides_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path)
    monkeypatch.setattr(resnet, "make_model", small_model)
    arguments = [*SMALL, f"--datadir={tmp_path}", "--num_epochs=1"]
    with pytest.raises(SystemExit) as ended:
        resnet.main([*arguments, "--target_accuracy=101"])
    assert ended.value.code == 21
    assert resnet.main([*arguments, "--eval_interval=2"]) != 0  # NaN: there was no test


def test_what_does_not_go_together() -> None:
    with pytest.raises(SystemExit, match="--model=resnet19 is no classifier"):
        resnet.make_model("resnet19", 10)
    with pytest.raises(SystemExit, match="no residual blocks"):
        resnet.blocks_of(small_model("", 10))
    from torchvision.models import resnet18

    assert [block.__name__ for block in resnet.blocks_of(resnet18())] == ["BasicBlock"]


@pytest.mark.slow
def test_resnet18_on_noise() -> None:
    flags = ["--fake_data", "--model=resnet18", "--image_size=32", "--batch_size=8", "--test_set_batch_size=8"]
    more = ["--num_steps=3", "--num_epochs=1", "--use_gradient_checkpointing"]
    out = subprocess.run(
        [sys.executable, str(RECIPE), *flags, *more], capture_output=True, text=True, timeout=600, check=True
    ).stdout
    assert re.search(r"^Max Accuracy: \d+\.\d\d%$", out, re.MULTILINE)


def test_noise_costs_nothing_to_make() -> None:
    options = resnet.parse_arguments(["--fake_data", "--image_size=16"])
    train, test, classes = resnet.make_data(options)
    assert (len(train), len(test), classes) == (1_281_167, 50_000, 1000)  # type: ignore[arg-type]
    image, label = train[len(train) - 1]  # type: ignore[arg-type]
    assert image.shape == (3, 16, 16)
    assert 0 <= label < 1000
    assert image.dtype == torch.float32
    assert xla.device().type == "xla"
