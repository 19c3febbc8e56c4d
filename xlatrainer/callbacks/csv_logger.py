"""`CSVLogger`: one line of numbers an epoch, in a file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from xlatrainer import storage
from xlatrainer.callbacks.callback import Callback, LogValues

__all__ = ["CSVLogger"]


class CSVLogger(Callback):
    """Writes the logs of each epoch as a line of a CSV file, on disk when the epoch ends.

    The columns are "epoch" (counted from 0) and the names of the first epoch's logs, in their order. For a name that
    appears later, such as that of a validation every other epoch, the file is written anew with a further column; a
    name that is missing in some epoch leaves its cell empty.

    Args:
        filename: The file, whose folder is made if need be; or a URL that fsspec knows, where each epoch writes all of
            the file.
        separator: Between the cells; default ",".
        append: True continues an existing file, below its header; default False, which overwrites it. A training that
            is resumed continues it in any case, without the epochs that are now trained again.
    """

    writes_files = True
    on_every_process = False

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        self.path = os.fspath(filename)
        self.separator = separator
        self.append = append
        self._columns: list[str] | None = None

    def on_train_begin(self, logs: LogValues) -> None:
        self._columns = None
        is_resumed = self.trainer.saver.resumed_from is not None
        if (self.append or is_resumed) and storage.exists(self.path) and storage.stat(self.path).size:
            rows = self._read()
            if is_resumed:
                self._write([row for row in rows if int(row["epoch"]) < self.trainer.epoch], is_new=True)
        else:
            storage.write(self.path, "")

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        row = {"epoch": epoch, **logs}
        if self._columns is None:
            self._columns = list(row)
            self._write([], is_new=True)
        elif not row.keys() <= set(self._columns):
            rows = self._read()
            self._columns += [name for name in row if name not in self._columns]
            self._write(rows, is_new=True)
        self._write([row], is_new=False)

    def _read(self) -> list[dict[str, str]]:
        """The rows of the file that were written whole; sets the columns to its."""
        text = io.StringIO(storage.read(self.path).decode(), newline="")
        whole = [line for line in text if line.endswith("\n")]
        reader = csv.DictReader(whole, delimiter=self.separator)
        self._columns = list(reader.fieldnames or ())
        return list(reader)

    def _write(self, rows: Sequence[Mapping[str, Any]], *, is_new: bool) -> None:
        """Write the header and `rows` to a new file that takes the place of the old one, or append `rows`."""
        assert self._columns is not None
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, delimiter=self.separator)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
        if is_new:
            storage.write(self.path, text.getvalue())
        else:
            with storage.open_file(self.path, "ab") as file:
                file.write(text.getvalue().encode())
