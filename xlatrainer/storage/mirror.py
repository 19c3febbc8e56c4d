"""A local folder for programs that only write to one, whose files go to a URL."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path as LocalPath

from xlatrainer.storage.files import join
from xlatrainer.storage.publishing import put_file
from xlatrainer.storage.systems import Path, locate

__all__ = ["Mirror"]


class Mirror:
    """The folder at a local path itself; or for a URL a temporary one, whose files are sent by `send` and `close`.

    Args:
        path: A local path or URL. Nothing is made before it is used.
    """

    def __init__(self, path: Path) -> None:
        location = locate(path)
        self._path = path
        self._local = LocalPath(location.inner) if location.system is None else None
        self._temporary: str | None = None
        self._sent: dict[str, tuple[int, int]] = {}

    @property
    def folder(self) -> LocalPath:
        """The local folder; a temporary one is made if there is none."""
        if self._local is not None:
            return self._local
        if self._temporary is None:
            self._temporary = tempfile.mkdtemp(prefix="xlatrainer-")
        return LocalPath(self._temporary)

    def shown(self, file: LocalPath) -> str:
        """The path or URL of a file in the folder, for messages."""
        return str(file) if self._local is not None else join(self._path, *file.relative_to(self.folder).parts)

    def send(self) -> None:
        """Send the files that are new or have changed since the last time; nothing for a local path."""
        if self._temporary is None:
            return
        for file in sorted(LocalPath(self._temporary).rglob("*")):
            if file.is_file():
                status = os.stat(file)
                state = (status.st_size, status.st_mtime_ns)
                if self._sent.get(str(file)) != state:
                    put_file(str(file), self.shown(file))
                    self._sent[str(file)] = state

    def close(self) -> None:
        """Send what is left, and remove the temporary folder."""
        self.send()
        if self._temporary is not None:
            shutil.rmtree(self._temporary)
            self._temporary = None
            self._sent.clear()
