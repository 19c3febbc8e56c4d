"""A training that may be killed at any moment and started again: the program that test_kill.py runs.

python -m tests.trainer.killed_training FOLDER STEPS WORKERS

Each step's number and loss (as a hexadecimal float, which is exact) become a line of FOLDER/losses; the last line is
"done". Started again, it goes on from the newest checkpoint in FOLDER.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import xlatrainer as xla

STEPS_IN_AN_EPOCH = 11
ROWS = 8 * STEPS_IN_AN_EPOCH - 5  # the last batch is short


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Examples that are augmented at random."""

    def __init__(self) -> None:
        self.inputs = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.inputs[index]
        return row + 0.1 * torch.randn(8), row[:3].argmax()


class Recorder(xla.callbacks.Callback):
    """Writes the losses down, and makes a step take long enough to be killed in."""

    def __init__(self, file: TextIO, seconds: float) -> None:
        self.file = file
        self.seconds = seconds

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        self.file.write(f"{self.trainer.step} {logs['loss'].hex()}\n")
        self.file.flush()
        time.sleep(self.seconds)


def train(folder: Path, steps: int, workers: int, seconds: float = 0.01) -> None:
    """Train up to `steps` steps, with a checkpoint every two."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    trainer = xla.Trainer(
        model, "adam", metrics=["accuracy"], scheduler=warmup, output_dir=folder, save_freq=2, max_to_keep=3
    )
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers)
    with (folder / "losses").open("a") as file:
        recorder = Recorder(file, seconds)
        trainer.fit(
            loader,
            epochs=steps,
            max_steps=steps,
            callbacks=[recorder],
            resume_from="last",
            verbose=0,
        )
        file.write("done\n")


def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that changes every epoch."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
