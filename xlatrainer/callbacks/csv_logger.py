"""`CSVLogger`: one line of numbers an epoch, in a file."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from xlatrainer.callbacks.callback import Callback, LogValues

__all__ = ["CSVLogger"]


class CSVLogger(Callback):
    """Writes the logs of each epoch as a line of a CSV file, on disk when the epoch ends.

    The columns are "epoch" (counted from 0) and the names of the first epoch's logs, in their order. A name that
    appears later is an error; one that is missing in some epoch leaves its cell empty.

    Args:
        filename: The file; its folder is made if need be.
        separator: Between the cells; default ",".
        append: True continues an existing file, below its header; default False, which overwrites it.
    """

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        self.path = Path(filename)
        self.separator = separator
        self.append = append
        self._columns: list[str] | None = None

    def on_train_begin(self, logs: LogValues) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = None
        if not self.append:
            self.path.write_text("")
        elif self.path.exists() and self.path.stat().st_size:
            with self.path.open(newline="") as file:
                self._columns = next(csv.reader(file, delimiter=self.separator))

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        row = {"epoch": epoch, **logs}
        is_new = self._columns is None
        if self._columns is None:
            self._columns = list(row)
        unknown = sorted(set(row) - set(self._columns))
        if unknown:
            raise ValueError(
                f"{self.path} has the columns {self._columns}, and there is none for {unknown}. "
                f"Write to another file, or use append=False to begin it anew"
            )
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self._columns, delimiter=self.separator)
            if is_new:
                writer.writeheader()
            writer.writerow(row)
