"""`JSONLogger`: one JSON object an epoch, in a file."""

from __future__ import annotations

import json
import math
import os

from xlatrainer import storage
from xlatrainer.callbacks.callback import Callback, LogValues

__all__ = ["JSONLogger"]


class JSONLogger(Callback):
    """Writes the logs of each epoch as a line of JSON (JSON lines), on disk when the epoch ends.

    Each line holds "epoch" (counted from 0), "step" (updates made), and the logs, which may differ from line to line.
    NaN and infinities, which JSON does not have, are written as null.

    Args:
        filename: The file, whose folder is made if need be; or a URL that fsspec knows, where each epoch writes all of
            the file.
        append: True continues an existing file; default False, which overwrites it. A training that is resumed
            continues it in any case, without the epochs that are now trained again.
    """

    writes_files = True
    on_every_process = False

    def __init__(self, filename: str | os.PathLike[str], append: bool = False) -> None:
        self.path = os.fspath(filename)
        self.append = append

    def on_train_begin(self, logs: LogValues) -> None:
        is_resumed = self.trainer.saver.resumed_from is not None
        if is_resumed and storage.exists(self.path):
            lines = storage.read(self.path).decode().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            storage.write(self.path, "".join(line for line in whole if json.loads(line)["epoch"] < self.trainer.epoch))
        elif not self.append:
            storage.write(self.path, "")

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in logs.items()}
        line = json.dumps({"epoch": epoch, "step": self.trainer.step, **values}, allow_nan=False)
        with storage.open_file(self.path, "ab") as file:
            file.write(f"{line}\n".encode())
