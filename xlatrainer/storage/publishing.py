"""Files that appear whole or not at all, and local copies of what is elsewhere.

Owns temporary names, which say what process uses them, and the flush to the disk. A local file is written under a
temporary name and renamed; stores show an object only when all of it has been sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from xlatrainer.storage.systems import locate, locate_file, tried

__all__ = [
    "TEMPORARY",
    "fetched",
    "flush_file",
    "flush_folder",
    "get_file",
    "is_abandoned",
    "publish_file",
    "put_file",
    "temporary_name",
]

TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}\.(?P<kind>writing|replaced|deleting)"
)
_in_use: set[str] = set()


def publish_file(
    path: str | os.PathLike[str], write: Callable[[Path], None], *, makedirs: bool = True, flush: bool = True
) -> None:
    """Let `write` fill a local file, and make it the one at `path`, a path or URL: whole or not at all.

    Several threads and processes may publish the same file at once: one of their files is there at any time.

    Args:
        path: A file there is replaced.
        write: Gets the name of a file that does not exist yet; where `flush` matters it has what it has written on the
            disk when it returns (`flush_file`).
        makedirs: Whether a missing folder is made. Default True.
        flush: Whether the name is on the disk too when this returns, and so outlives a loss of power. Default True.

    Raises:
        FileNotFoundError: Without `makedirs`, if the folder is missing; or if the bucket does not exist.
        IsADirectoryError: If `path` is a folder.
    """
    location = locate_file(path)
    if location.system is not None:
        with tempfile.TemporaryDirectory(prefix="xlatrainer-") as folder:
            write(Path(folder) / "file")
            put_file(os.path.join(folder, "file"), path, makedirs=makedirs)
        return
    target = Path(os.path.abspath(location.inner))
    if makedirs:
        location.make_parents()
    with temporary_name(target, "writing") as temporary:
        try:
            write(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        if flush:
            flush_folder(target.parent)


@contextlib.contextmanager
def published(path: str | os.PathLike[str], *, makedirs: bool = False, flush: bool = True) -> Iterator[IO[bytes]]:
    """A file to be written, which is at `path`, a path or URL, when the block ends; an exception leaves the old one.

    Args:
        path: A file there is replaced.
        makedirs: Whether a missing folder is made. Default False.
        flush: Whether it is on the disk after the block, and so outlives a loss of power. Default True.
    """
    location = locate_file(path)
    if makedirs:
        location.make_parents()
    file: Any
    if location.system is not None:
        with tempfile.NamedTemporaryFile(prefix="xlatrainer-") as file:
            yield file.file
            file.flush()
            put_file(file.name, path, makedirs=makedirs)
        return
    target = Path(os.path.abspath(location.inner))
    with temporary_name(target, "writing") as temporary:
        try:
            with open(temporary, "xb") as file:
                yield file
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        if flush:
            flush_folder(target.parent)


def put_file(local: str, path: str | os.PathLike[str], *, makedirs: bool = True) -> None:
    """Copy a local file to a URL, which has it when all of it has been sent."""
    location = locate_file(path)
    if makedirs:
        location.make_parents()
    tried(location, lambda: location.system.put_file(local, location.inner))


def get_file(path: str | os.PathLike[str], local: str) -> None:
    """Copy the object at a URL to a local file.

    Raises:
        FileNotFoundError: If it does not exist; there is no local file then.
    """
    location = locate_file(path)
    try:
        tried(location, lambda: location.system.get_file(location.inner, local))
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(local)  # some file systems have made an empty one
        raise


@contextlib.contextmanager
def fetched(path: str | os.PathLike[str], endings: tuple[str, ...]) -> Iterator[Path]:
    """A local path to the file or folder at `path`, a path or URL, for the length of the block.

    Args:
        path: A file; or a folder, of whose files only those with one of `endings` may be there.
        endings: Such as ".safetensors".

    Raises:
        FileNotFoundError: If there is none.
    """
    location = locate(path)
    if location.system is None:
        if not os.path.exists(location.inner):
            raise FileNotFoundError(f"{location.shown} does not exist")
        yield Path(os.path.abspath(location.inner))
        return
    system, inner = location.system, location.inner.rstrip("/")
    system.invalidate_cache(inner)
    is_folder = tried(location, lambda: system.info(inner))["type"] == "directory"
    remote = tried(location, lambda: system.ls(inner, detail=False)) if is_folder else [inner]
    with tempfile.TemporaryDirectory(prefix="xlatrainer-") as folder:
        for name in remote:
            if not is_folder or name.endswith(endings):
                last = name.rstrip("/").rpartition("/")[2]
                get_file(f"{location.shown.rstrip('/')}/{last}" if is_folder else path, os.path.join(folder, last))
        yield Path(folder) if is_folder else Path(folder) / inner.rpartition("/")[2]


@contextlib.contextmanager
def temporary_name(path: Path, kind: str) -> Iterator[Path]:
    """A hidden name beside `path` that says who uses it; `kind` is "writing", "replaced" or "deleting"."""
    name = f".{path.name}.{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.{kind}"
    _in_use.add(name)
    try:
        yield path.with_name(name)
    finally:
        _in_use.discard(name)


def is_abandoned(host: str, pid: int, name: str) -> bool:
    """Whether the process that used a temporary name is certainly gone."""
    if host != _host():
        return False
    if pid == os.getpid():
        return name not in _in_use  # of an earlier process with our number
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def flush_file(path: str | os.PathLike[str]) -> None:
    """Have the contents of a local file on the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Have the names in a local folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
