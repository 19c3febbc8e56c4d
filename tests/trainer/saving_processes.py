"""Two processes that train together and save: what those that test_share.py launches do.

Each writes the losses of a training, and those of one that was resumed in the middle of an epoch.
"""

import json
from pathlib import Path

from tests.trainer.test_resume_elsewhere import OPTIONS, batches, trainer_with

RESUMED_FROM = 6


def train(index: int, folder: Path) -> None:
    """Batches are those of both processes together."""
    trainer, losses = trainer_with("fsdp", OPTIONS["adamw"], output_dir=folder, save_freq=2, max_to_keep=2)
    trainer.fit(batches(), epochs=2, verbose=0)
    again, resumed = trainer_with("fsdp", OPTIONS["adamw"])
    again.fit(batches(), epochs=2, verbose=0, resume_from=folder / "checkpoints" / f"step_{RESUMED_FROM:08d}")
    (folder / f"losses{index}").write_text(json.dumps([losses, resumed]))
