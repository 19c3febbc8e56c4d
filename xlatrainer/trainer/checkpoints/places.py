"""Folders that appear whole or not at all, on this machine or behind any URL that fsspec knows.

Owns temporary names, the flush to the disk, the rename, and the rule what may be deleted: only files of names that a
checkpoint has, and half-written folders only if the process that wrote them is dead. Knows nothing of what the files
hold.

On a local disk a folder gets its name when all of it is on the disk. A remote store cannot rename a folder: there the
manifest is written last and removed first, and a folder without one counts as not there.
"""

import contextlib
import hashlib
import os
import re
import socket
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

__all__ = ["FILES", "MANIFEST", "Place", "fetched", "place_of", "publish_file"]

MANIFEST = "manifest.json"
FILES = ("model.safetensors", "state.safetensors", "state.json", MANIFEST)  # all names that a checkpoint ever has


class Place(ABC):
    """A folder that may hold a checkpoint, or folders of checkpoints."""

    @abstractmethod
    def __str__(self) -> str:
        """The path or URL, as messages show it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the path."""

    @abstractmethod
    def child(self, name: str) -> "Place":
        """The folder `name` in this one."""

    @abstractmethod
    def children(self) -> list[str]:
        """The names of the folders in this one, in no order; none if it does not exist."""

    @abstractmethod
    def holds_checkpoint(self) -> bool:
        """Whether there is a manifest, the last thing to be written."""

    @abstractmethod
    def manifest(self) -> bytes:
        """The contents of the manifest.

        Raises:
            FileNotFoundError: If there is no checkpoint here.
        """

    @abstractmethod
    def publish(self, write: Callable[[Path], None]) -> None:
        """Let `write` fill a local folder, and make it this one. A checkpoint that was here before is replaced.

        Raises:
            FileExistsError: If this is a folder that holds something else.
        """

    @abstractmethod
    def opened(self) -> contextlib.AbstractContextManager[Path]:
        """A local folder with those files of the checkpoint that there are, for the length of the block."""

    @abstractmethod
    def remove(self) -> None:
        """Delete the checkpoint. Files that are none of its own stay."""

    @abstractmethod
    def remove_file(self) -> None:
        """Delete the file of this name, if there is one."""

    @abstractmethod
    def clean(self) -> list[str]:
        """Delete what processes that are dead left half-written in this folder; returns the names."""


def place_of(path: str | os.PathLike[str]) -> Place:
    """The place that a path or a URL (`gs://`, `s3://`, `memory://`, ...) names.

    Raises:
        ImportError: If the library for that kind of URL is not installed; fsspec's message names it.
    """
    text = os.fspath(path)
    if "://" not in text:
        return _Local(Path(text))
    system, inner = fsspec.url_to_fs(text)
    return _Local(Path(inner)) if isinstance(system, LocalFileSystem) else _Remote(system, inner, text.rstrip("/"))


def publish_file(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """Let `write` fill a local file, and make it the one at `path`, a path or URL: whole or not at all.

    Args:
        path: Its folder is made if need be. A file there is replaced.
        write: Has what it has written on the disk when it returns.

    Raises:
        IsADirectoryError: If `path` is a folder.
    """
    place = place_of(path)
    if isinstance(place, _Remote):
        with tempfile.TemporaryDirectory(prefix="xlatrainer-") as folder:
            write(Path(folder) / "file")
            place.put(Path(folder) / "file")
        return
    assert isinstance(place, _Local)
    target = place.path
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_name(target, "writing") as temporary:
        try:
            write(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        _flush_folder(target.parent)


@contextlib.contextmanager
def fetched(path: str | os.PathLike[str], endings: tuple[str, ...]) -> Iterator[Path]:
    """A local path to the file or folder at `path`, a path or URL, for the length of the block.

    Args:
        path: A file; or a folder, of whose files only those with one of `endings` may be there.
        endings: Such as ".safetensors".

    Raises:
        FileNotFoundError: If there is none.
    """
    place = place_of(path)
    if isinstance(place, _Remote):
        with tempfile.TemporaryDirectory(prefix="xlatrainer-") as folder:
            yield place.get(Path(folder), endings)
        return
    assert isinstance(place, _Local)
    if not place.path.exists():
        raise FileNotFoundError(f"{place} does not exist")
    yield place.path


class _Local(Place):
    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.abspath(path))
        self._shown = os.fspath(path)

    def __str__(self) -> str:
        return self._shown

    @property
    def path(self) -> Path:
        """The path, absolute."""
        return self._path

    @property
    def name(self) -> str:
        return self._path.name

    def child(self, name: str) -> "_Local":
        return _Local(Path(self._shown) / name)

    def children(self) -> list[str]:
        if not self._path.is_dir():
            return []
        return [entry.name for entry in self._path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]

    def holds_checkpoint(self) -> bool:
        return (self._path / MANIFEST).is_file()

    def publish(self, write: Callable[[Path], None]) -> None:
        if self._path.is_dir() and not self.holds_checkpoint() and any(self._path.iterdir()):
            raise FileExistsError(
                f"{self} is a folder that holds something else than a checkpoint; save under a name of its own in it"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_name(self._path, "writing") as temporary:
            temporary.mkdir()
            try:
                write(temporary)
                _flush_folder(temporary)
            except BaseException:
                _remove_own_files(temporary)
                raise
            self._take(temporary)

    def _take(self, temporary: Path) -> None:
        """Give the whole folder at `temporary` this name."""
        if not os.path.lexists(self._path):
            os.rename(temporary, self._path)
            _flush_folder(self._path.parent)
            return
        with _temporary_name(
            self._path, "replaced"
        ) as old:  # a killed process leaves it there, and `clean` puts it back
            os.rename(self._path, old)
            os.rename(temporary, self._path)
            _flush_folder(self._path.parent)
            if not old.is_dir():
                old.unlink()
                return
            _remove_own_files(old, others_to=self._path)

    def manifest(self) -> bytes:
        if not self._path.exists():
            _Local(self._path.parent).clean()  # a replacement that was killed between its two renames
        if not self.holds_checkpoint():
            what = f"is no checkpoint: it has no {MANIFEST}" if self._path.exists() else "does not exist"
            raise FileNotFoundError(f"{self} {what}")
        return (self._path / MANIFEST).read_bytes()

    @contextlib.contextmanager
    def opened(self) -> Iterator[Path]:
        yield self._path

    def remove(self) -> None:
        with _temporary_name(self._path, "deleting") as temporary:
            os.rename(self._path, temporary)
            _remove_own_files(temporary)

    def remove_file(self) -> None:
        self._path.unlink(missing_ok=True)

    def clean(self) -> list[str]:
        if not self._path.is_dir():
            return []
        removed = []
        for entry in sorted(self._path.iterdir()):
            left = _TEMPORARY.fullmatch(entry.name)
            if left is None or not _is_abandoned(left["host"], int(left["pid"]), entry.name):
                continue
            target = self._path / left["name"]
            if left["kind"] == "replaced" and not os.path.lexists(target):
                os.rename(entry, target)
                continue
            if entry.is_dir():
                _remove_own_files(entry)
            else:
                entry.unlink()
            removed.append(entry.name)
        return removed


class _Remote(Place):
    def __init__(self, system: Any, path: str, shown: str) -> None:
        self._system = system
        self._path = path.rstrip("/")
        self._shown = shown

    def __str__(self) -> str:
        return self._shown

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    def child(self, name: str) -> "_Remote":
        return _Remote(self._system, f"{self._path}/{name}", f"{self._shown}/{name}")

    def children(self) -> list[str]:
        self._system.invalidate_cache(self._path)
        try:
            found = self._system.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        return [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]

    def holds_checkpoint(self) -> bool:
        self._system.invalidate_cache(self._path)
        return bool(self._system.exists(f"{self._path}/{MANIFEST}"))

    def publish(self, write: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="xlatrainer-") as folder:
            write(Path(folder))
            if self.holds_checkpoint():
                self._system.rm_file(f"{self._path}/{MANIFEST}")
            self._system.makedirs(self._path, exist_ok=True)
            for name in FILES:  # the manifest is the last of them
                self._system.put_file(os.path.join(folder, name), f"{self._path}/{name}")

    def manifest(self) -> bytes:
        if not self.holds_checkpoint():
            raise FileNotFoundError(f"{self} is no checkpoint: it has no {MANIFEST}")
        return bytes(self._system.cat_file(f"{self._path}/{MANIFEST}"))

    @contextlib.contextmanager
    def opened(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="xlatrainer-") as folder:
            for name in FILES:
                with contextlib.suppress(FileNotFoundError):  # a missing file is reported by who knows the manifest
                    self._system.get_file(f"{self._path}/{name}", os.path.join(folder, name))
            yield Path(folder)

    def remove(self) -> None:
        for name in reversed(FILES):
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(f"{self._path}/{name}")
        with contextlib.suppress(OSError):  # a folder that holds something else stays, and most stores have no folders
            self._system.rmdir(self._path)

    def remove_file(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path)

    def put(self, file: Path) -> None:
        """Copy a local file here."""
        self._system.makedirs(self._path.rpartition("/")[0], exist_ok=True)
        self._system.put_file(str(file), self._path)

    def get(self, folder: Path, endings: tuple[str, ...]) -> Path:
        """Copy the file here, or the files with these endings in the folder here, into a local folder."""
        self._system.invalidate_cache(self._path)
        if not self._system.exists(self._path):
            raise FileNotFoundError(f"{self} does not exist")
        is_file = self._system.isfile(self._path)
        remote = [self._path] if is_file else self._system.ls(self._path, detail=False)
        for name in remote:
            if is_file or name.endswith(endings):
                self._system.get_file(name, str(folder / name.rpartition("/")[2]))
        return folder / self.name if is_file else folder

    def clean(self) -> list[str]:
        return []  # nothing tells whether the process that writes a folder is alive: it may be on another machine


_TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}\.(?P<kind>writing|replaced|deleting)"
)
_in_use: set[str] = set()


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


@contextlib.contextmanager
def _temporary_name(path: Path, kind: str) -> Iterator[Path]:
    """A hidden name beside `path` that says who uses it."""
    name = f".{path.name}.{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.{kind}"
    _in_use.add(name)
    try:
        yield path.with_name(name)
    finally:
        _in_use.discard(name)


def _is_abandoned(host: str, pid: int, name: str) -> bool:
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


def _flush_folder(folder: Path) -> None:
    """Have the names in `folder` on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_own_files(folder: Path, others_to: Path | None = None) -> None:
    """Delete a checkpoint's files in `folder`, and `folder` if nothing else is in it or all else can be moved."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    others = list(folder.iterdir())
    if others_to is not None:
        for other in others:
            os.rename(other, others_to / other.name)
    elif others:
        return
    folder.rmdir()
