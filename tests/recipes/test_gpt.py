"""The recipe for a GPT: it learns, it writes, on one device and on a mesh."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes import gpt

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "gpt.py"
FLAGS = "steps=20 eval_every=10 batch_size=8 length=16 width=32 blocks=1 lr=0.01 sample=12"
SMALL = [*(f"--{flag}" for flag in FLAGS.split()), "--describe"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A short one, so that a validation is one batch."""
    path = tmp_path / "text.txt"
    path.write_bytes(gpt.SHIPPED_TEXT.read_bytes()[:1300])
    return f"--text={path}"


def test_the_same_losses_and_sample_on_a_mesh(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, several = gpt.main([*SMALL, text]), gpt.main([*SMALL, text, "--mesh=data=2,model=2"])
    assert one["val_loss"][-1] < one["val_loss"][0] < 5.5  # log(256)
    assert one["loss"][-1] < one["loss"][0] - 0.3
    assert several["loss"] == pytest.approx(one["loss"], rel=1e-4)
    out = capsys.readouterr().out
    first, second = out.split("GPT of ")[1:]
    assert re.search(r"loss on the text held out: \d\.\d{3} nats a byte\nIt goes on writing:\n", first)
    assert len(first.partition("It goes on writing:\n")[2]) == 12 + 1
    assert "everything is on xla:0" in first
    assert "MeshStrategy on Mesh({'data': 2, 'model': 2}, device_ids=[0, 1, 2, 3])" in second
    assert re.search(r"blocks.0.down.weight +32x128 +-, model +8,192 +24,576", second)


def test_the_text_that_ships() -> None:
    train, held_out = gpt.read_text(str(gpt.SHIPPED_TEXT))
    assert (len(train), len(held_out)) == (112_662, 12_517)
    assert bytes(train[:15].tolist()) == b"\tAS YOU LIKE IT"
    assert int(train.max()) < 128


def test_windows() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    windows = gpt.Windows(text, 3)
    assert len(windows) == 7
    assert [part.tolist() for part in windows[6]] == [[6, 7, 8], [7, 8, 9]]
    apart = gpt.Windows(text, 3, stride=3)
    assert [apart[i][0].tolist() for i in range(len(apart))] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len(gpt.Windows(text, 10)) == 0


@pytest.mark.parametrize("wrong", ["data", "data=0", "x=2", "data=2,data=2", "data=-1"])
def test_a_mesh_that_is_none(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="give data=N, model=N or both: data=2,model=2"):
        gpt.parse_mesh(wrong)


def test_what_does_not_fit_is_said(text: str) -> None:
    with pytest.raises(SystemExit, match=r"--mesh: there are the devices 0 to 7 \(CPU_NUM_DEVICES=N"):
        gpt.main([*SMALL, text, "--mesh=data=16"])
    with pytest.raises(SystemExit, match="--mesh: 4 heads cannot be split over 8 devices"):
        gpt.main([*SMALL, text, "--mesh=model=8"])
    with pytest.raises(SystemExit, match="too short for --length 200: 1,300 bytes"):
        gpt.main([*SMALL, text, "--length=200"])


def test_help() -> None:
    out = subprocess.run(
        [sys.executable, str(RECIPE), "--help"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    for said in ("--strategy {single,ddp,fsdp,hsdp,zero1,zero2,auto}", "data=2,model=2", "CPU_NUM_DEVICES=8"):
        assert said in " ".join(out.split())
