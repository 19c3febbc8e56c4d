"""`CSVLogger`: one line of numbers an epoch, in a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xlatrainer.callbacks.callback import Callback, LogValues

__all__ = ["CSVLogger"]


class CSVLogger(Callback):
    """Writes the logs of each epoch as a line of a CSV file, on disk when the epoch ends.

    The columns are "epoch" (counted from 0) and the names of the first epoch's logs, in their order. For a name that
    appears later, such as that of a validation every other epoch, the file is written anew with a further column; a
    name that is missing in some epoch leaves its cell empty.

    Args:
        filename: The file; its folder is made if need be.
        separator: Between the cells; default ",".
        append: True continues an existing file, below its header; default False, which overwrites it. A training that
            is resumed continues it in any case, without the epochs that are now trained again.
    """

    writes_files = True

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        self.path = Path(filename)
        self.separator = separator
        self.append = append
        self._columns: list[str] | None = None

    def on_train_begin(self, logs: LogValues) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = None
        is_resumed = self.trainer.saver.resumed_from is not None
        if (self.append or is_resumed) and self.path.exists() and self.path.stat().st_size:
            rows = self._read()
            if is_resumed:
                self._write([row for row in rows if int(row["epoch"]) < self.trainer.epoch], "w")
        else:
            self.path.write_text("")

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        row = {"epoch": epoch, **logs}
        if self._columns is None:
            self._columns = list(row)
            self._write([], "w")
        elif not row.keys() <= set(self._columns):
            rows = self._read()
            self._columns += [name for name in row if name not in self._columns]
            self._write(rows, "w")
        self._write([row], "a")

    def _read(self) -> list[dict[str, str]]:
        """The rows of the file that were written whole; sets the columns to its."""
        with self.path.open(newline="") as file:
            whole = [line for line in file.readlines() if line.endswith("\n")]
        reader = csv.DictReader(whole, delimiter=self.separator)
        self._columns = list(reader.fieldnames or ())
        return list(reader)

    def _write(self, rows: Sequence[Mapping[str, Any]], mode: str) -> None:
        """Write the header and `rows` to a new file that takes the place of the old one, or append `rows`."""
        target = self.path if mode == "a" else self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        assert self._columns is not None
        with target.open(mode, newline="") as file:
            writer = csv.DictWriter(file, self._columns, delimiter=self.separator)
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)
        if mode == "w":
            os.replace(target, self.path)
