"""`JSONLogger`: one JSON object an epoch, in a file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from xlatrainer.callbacks.callback import Callback, LogValues

__all__ = ["JSONLogger"]


class JSONLogger(Callback):
    """Writes the logs of each epoch as a line of JSON (JSON lines), on disk when the epoch ends.

    Each line holds "epoch" (counted from 0), "step" (updates made), and the logs, which may differ from line to line.
    NaN and infinities, which JSON does not have, are written as null.

    Args:
        filename: The file; its folder is made if need be.
        append: True continues an existing file; default False, which overwrites it.
    """

    def __init__(self, filename: str | os.PathLike[str], append: bool = False) -> None:
        self.path = Path(filename)
        self.append = append

    def on_train_begin(self, logs: LogValues) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.append:
            self.path.write_text("")

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in logs.items()}
        line = json.dumps({"epoch": epoch, "step": self.trainer.step, **values}, allow_nan=False)
        with self.path.open("a") as file:
            file.write(f"{line}\n")
