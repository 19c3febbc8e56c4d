"""Google Cloud Storage under the names that PyTorch/XLA had, and every other URL that fsspec knows.

    from xlatrainer.data import gcsfs
    gcsfs.write("gs://bucket/notes.txt", "text")
    gcsfs.generic_read("notes.txt")

`open`, `list`, `stat`, `remove`, `rmtree`, `read` and `write` take URLs, `gs://BUCKET_NAME/PATH` or another; the
`generic_` functions take local paths too. Credentials are those of GOOGLE_APPLICATION_CREDENTIALS or of the machine;
STORAGE_EMULATOR_HOST leads to an emulator. Errors and retries are those of `xlatrainer.storage`.
"""

from __future__ import annotations

import builtins
import fnmatch
import os
from typing import IO, Any

from xlatrainer.storage import files
from xlatrainer.storage.systems import Path, remote, tried

__all__ = [
    "GcsBlob",
    "generic_open",
    "generic_read",
    "generic_write",
    "is_gcs_path",
    "list",
    "open",
    "read",
    "remove",
    "rmtree",
    "stat",
    "write",
]

GcsBlob = files.Entry


def is_gcs_path(path: Path) -> bool:
    """Whether `path` starts with "gs://", in these letters."""
    return os.fspath(path).startswith("gs://")


def open(path: str, mode: str = "r", encoding: str | None = None) -> IO[Any]:
    """A file object over a URL; what is written is sent at `flush` and `close`. See `storage.files.open_file`.

    Args:
        path: The URL.
        mode: "r", "w", "a", "x", with "b" for bytes and "+" for reading and writing. Default "r".
        encoding: Of text; default None, that of the locale.

    Raises:
        FileNotFoundError: If the object or its bucket does not exist.
        PermissionError: If the store refuses access.
        ValueError: If `path` is no URL, or for another mode.
    """
    remote(path)
    return files.open_file(path, mode, encoding)


def list(path: str) -> builtins.list[GcsBlob]:
    """The files and folders in a folder, by name, each with `path` (a URL), `size`, `mtime` and `isdir`.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If `path` is no URL.
    """
    remote(path)
    return files.list_folder(path)


def stat(path: str) -> GcsBlob:
    """The `path`, `size` in bytes, `mtime` in seconds since 1970 and `isdir` of one file or folder.

    Raises:
        FileNotFoundError: If it does not exist.
        ValueError: If `path` is no URL.
    """
    remote(path)
    return files.stat(path)


def remove(path: str) -> None:
    """Delete one file.

    Raises:
        FileNotFoundError: If it does not exist.
        ValueError: If `path` is no URL.
    """
    remote(path)
    files.remove(path)


def rmtree(path: str) -> None:
    """Delete all that is in a folder, or the files whose URLs a pattern with `*`, `?` or `[...]` matches.

    In a pattern, `*` stands for slashes too. It goes on after an error, and raises the last one.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If `path` is no URL.
    """
    location = remote(path)
    if not any(character in location.inner for character in "*?["):
        files.remove_tree(path)
        return
    folder = location.inner[: min(location.inner.find(c) for c in "*?[" if c in location.inner)].rpartition("/")[0]
    location.system.invalidate_cache(folder)
    names = tried(location, lambda: location.system.find(folder))
    matching = [name for name in names if fnmatch.fnmatchcase(name, location.inner)]
    if not matching:
        raise FileNotFoundError(f"nothing matches {path}")
    files.remove_all(location, matching)


def read(path: str) -> bytes:
    """The whole contents of an object.

    Raises:
        FileNotFoundError: If the object or its bucket does not exist.
        ValueError: If `path` is no URL.
    """
    remote(path)
    return files.read(path)


def write(path: str, content: str | bytes | IO[Any]) -> None:
    """Make `content` the object at `path`: a string (UTF-8), bytes, or an open file, read to its end.

    Raises:
        FileNotFoundError: If the bucket does not exist.
        ValueError: If `path` is no URL.
    """
    remote(path)
    files.write(path, content)


def generic_open(path: Path, mode: str = "r", encoding: str | None = None) -> IO[Any]:
    """`open` for URLs, Python's own `open` for local paths."""
    return files.open_file(path, mode, encoding)


def generic_read(path: Path) -> bytes:
    """The whole contents of a local file or a URL."""
    return files.read(path)


def generic_write(output_string: str | bytes, path: Path, makedirs: bool = False) -> None:
    """Make a string (UTF-8) or bytes the file at `path`, whole or not at all. The content comes first.

    Args:
        output_string: The content.
        path: A local path or a URL.
        makedirs: Whether a missing local folder is made. Default False.

    Raises:
        FileNotFoundError: If the folder or bucket is missing.
    """
    files.write(path, output_string, makedirs=makedirs)
