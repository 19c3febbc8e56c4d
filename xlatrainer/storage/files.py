"""Files and folders at a path or URL: what is there, reading, writing, opening, removing.

A path is a local one (`str` or `os.PathLike`) or a URL that fsspec knows (`gs://BUCKET_NAME/PATH`, `s3://`,
`memory://`, `file://`). Operations on stores are retried (`systems.tried`). Errors name the path and say whether the
file, the bucket or the permission is missing.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from xlatrainer.storage.publishing import publish_file
from xlatrainer.storage.systems import Location, Path, explained, locate, locate_file, tried

__all__ = [
    "Entry",
    "exists",
    "join",
    "list_folder",
    "make_folder",
    "open_file",
    "read",
    "remove",
    "remove_tree",
    "stat",
    "write",
]

Content = str | bytes | bytearray | memoryview | IO[Any]
_MODES = {"r", "w", "a", "x", "r+", "w+", "a+", "x+"}


@dataclass(frozen=True)
class Entry:
    """A file or folder.

    Attributes:
        path: The path or URL that the functions here take.
        size: In bytes; 0 for folders of stores.
        mtime: When it was last written, in seconds since 1970; None where the store does not say.
        isdir: Whether it is a folder.
    """

    path: str
    size: int
    mtime: float | None
    isdir: bool

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]


def join(path: Path, *names: str) -> str:
    """The path or URL of something in the folder `path`."""
    text = os.fspath(path)
    return "/".join([text.rstrip("/"), *names]) if "://" in text else os.path.join(text, *names)


def read(path: Path, start: int = 0, stop: int | None = None) -> bytes:
    """The contents of a file, or the bytes from `start` to before `stop` of them; fewer where the file ends.

    Raises:
        FileNotFoundError: If it does not exist; the message says if the bucket does not.
        PermissionError: If it may not be read.
    """
    location = locate_file(path)
    if location.system is None:
        with open(location.inner, "rb", buffering=0) as file:
            file.seek(start)
            return file.read() if stop is None else _read_up_to(file, stop - start)
    if start == 0 and stop is None:
        return bytes(tried(location, lambda: location.system.cat_file(location.inner)))
    return bytes(tried(location, lambda: location.system.cat_file(location.inner, start, stop)))


def _read_up_to(file: io.FileIO, size: int) -> bytes:
    content = file.read(size)
    while len(content) < size and (more := file.read(size - len(content))):  # the system gives at most 2 GiB at once
        content += more
    return content


def write(path: Path, content: Content, *, makedirs: bool = True, flush: bool = True) -> None:
    """Make `content` the file at `path`: whole or not at all, also with several writers at once.

    Args:
        path: A file there is replaced.
        content: Bytes; a string, which is encoded as UTF-8; or an open file, which is read to its end.
        makedirs: Whether a missing folder is made. Default True.
        flush: Whether the file is on the disk when this returns, and so outlives a loss of power. Default True.

    Raises:
        FileNotFoundError: Without `makedirs`, if the folder is missing; or if the bucket is.
        PermissionError: If it may not be written.
    """

    def fill(temporary: os.PathLike[str]) -> None:
        with open(temporary, "wb") as file:
            _copy(content, file)
            if flush:
                file.flush()
                os.fsync(file.fileno())

    location = locate_file(path)
    if location.system is None or not isinstance(content, str | bytes | bytearray | memoryview):
        publish_file(path, fill, makedirs=makedirs, flush=flush)
        return
    data = content.encode() if isinstance(content, str) else bytes(content)
    if makedirs:
        location.make_parents()
    tried(location, lambda: location.system.pipe_file(location.inner, data))


def exists(path: Path) -> bool:
    """Whether there is a file or folder.

    Raises:
        PermissionError: If the store does not say.
    """
    try:
        stat(path)
    except FileNotFoundError:
        return False
    return True


def stat(path: Path) -> Entry:
    """The size and time of one file or folder.

    Raises:
        FileNotFoundError: If it does not exist; the message says if the bucket does not.
    """
    location = locate(path)
    if location.system is None:
        found = os.stat(location.inner)
        return Entry(location.shown, found.st_size, found.st_mtime, os.path.isdir(location.inner))
    location.system.invalidate_cache(location.inner)
    found = tried(location, lambda: location.system.info(location.inner))
    return _entry(found, location.shown)


def list_folder(path: Path) -> list[Entry]:
    """What is in a folder, by name; only its own files and folders, not theirs.

    Raises:
        FileNotFoundError: If there is no such folder; in a store, one without files does not exist.
        NotADirectoryError: If it is a file.
    """
    location = locate(path)
    if location.system is None:
        entries = []
        for item in os.scandir(location.inner):
            with contextlib.suppress(FileNotFoundError):  # gone since the folder was read
                found = item.stat()
                entries.append(Entry(join(path, item.name), found.st_size, found.st_mtime, item.is_dir()))
        return sorted(entries, key=lambda entry: entry.path)
    inner = location.inner.rstrip("/")
    location.system.invalidate_cache(inner)
    found = tried(location, lambda: location.system.ls(inner, detail=True))
    names = {item["name"].rstrip("/"): item for item in found}
    if inner in names and names[inner]["type"] != "directory":
        raise NotADirectoryError(f"{location.shown} is a file")
    names.pop(inner, None)  # the empty object that some tools write for a folder
    return [_entry(item, join(path, name.rpartition("/")[2])) for name, item in sorted(names.items())]


def make_folder(path: Path) -> None:
    """Make a folder and those that it is in; nothing where it is there, or where there are only objects."""
    locate(join(path, "file")).make_parents()


def remove(path: Path) -> None:
    """Delete one file.

    Raises:
        FileNotFoundError: If it does not exist.
        IsADirectoryError: If it is a local folder.
    """
    location = locate_file(path)
    if location.system is None:
        os.remove(location.inner)
    else:
        tried(location, lambda: location.system.rm_file(location.inner))
        location.system.invalidate_cache(location.inner)


def remove_tree(path: Path) -> None:
    """Delete a folder with all that is in it. Goes on after an error, and raises the last one.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    location = locate(path)
    if location.system is None:
        errors: list[Any] = []
        name = "onexc" if sys.version_info >= (3, 12) else "onerror"  # with the error, or with what sys.exc_info gives
        shutil.rmtree(location.inner, **{name: lambda function, path, error: errors.append(error)})  # type: ignore[arg-type]
        if errors:
            raise errors[-1] if isinstance(errors[-1], BaseException) else errors[-1][1]
        return
    inner = location.inner.rstrip("/")
    location.system.invalidate_cache(inner)
    names = tried(location, lambda: location.system.find(inner))
    if not names:
        raise FileNotFoundError(f"{location.shown} does not exist")
    remove_all(location, names)
    if not location.is_object_store and location.system.exists(inner):
        tried(location, lambda: location.system.rm(inner, recursive=True))


def remove_all(location: Location, names: list[str]) -> None:
    """Delete these files of a file system. Goes on after an error, and raises the last one."""
    last: Exception | None = None
    for name in names:
        each = Location(location.system, name, f"{location.shown.partition('://')[0]}://{name.lstrip('/')}")
        try:
            tried(each, lambda name=name: location.system.rm_file(name))  # type: ignore[misc]
        except (OSError, ValueError) as error:
            last = error
    location.system.invalidate_cache()
    if last is not None:
        raise last


def open_file(path: Path, mode: str = "r", encoding: str | None = None) -> IO[Any]:
    """A file object.

    A local path is opened by Python's own `open`. What is written to a store is sent by `flush` and at the end, as a
    whole: until then the old object is there, and an exception in the `with` block leaves it. Appending ("a") and
    updating ("r+") read the object first, into a temporary file.

    Args:
        path: A path or URL.
        mode: "r", "w", "a", "x", each with "b" for bytes and "+" for reading and writing. Default "r".
        encoding: Of text; default None, that of the locale, as for `open`.

    Raises:
        FileExistsError: For "x", if the file is there.
        FileNotFoundError: If it does not exist and the mode does not make it.
        ValueError: For another mode.
    """
    kind = mode.replace("b", "").replace("t", "")
    if kind not in _MODES or ("b" in mode and "t" in mode):
        raise ValueError(f"the mode {mode!r} is none of {', '.join(sorted(_MODES))}, each with 'b' for bytes")
    location = locate_file(path)
    if location.system is None:
        return open(location.inner, mode, encoding=encoding)
    if kind == "r":
        location.system.invalidate_cache(location.inner)
        file: Any = tried(location, lambda: location.system.open(location.inner, "rb"))
        return file if "b" in mode else io.TextIOWrapper(file, encoding=encoding)
    upload = _upload(location, kind)
    return upload if "b" in mode else _TextUpload(upload, encoding=encoding)


def _upload(location: Location, kind: str) -> Upload:
    if kind[0] == "x" and exists(location.shown):
        raise FileExistsError(f"{location.shown} exists")
    with contextlib.ExitStack() as stack:
        copy = tempfile.NamedTemporaryFile(prefix="xlatrainer-", buffering=0)  # noqa: SIM115 - closed by the upload
        stack.callback(copy.close)
        is_there = kind[0] in "ra" and _copy_object(location, copy)
        if kind[0] == "r" and not is_there:
            raise FileNotFoundError(f"{location.shown} does not exist")
        if kind[0] == "r":
            copy.seek(0)
        stack.pop_all()
    return Upload(location, copy, is_there)


def _copy_object(location: Location, copy: IO[bytes]) -> bool:
    """Copy an object into a temporary file, whose position is then its end; False if there is none."""
    try:
        with explained(location), location.system.open(location.inner, "rb") as file:
            shutil.copyfileobj(file, copy, 1 << 20)
    except FileNotFoundError:
        return False
    return True


class Upload(io.BufferedRandom):
    """A temporary local file that becomes an object when it is flushed or closed; see `open_file`."""

    def __init__(self, location: Location, copy: Any, is_sent: bool) -> None:
        super().__init__(copy)
        self._location = location
        self._copy = copy
        self._is_sent = is_sent  # an object that is new is made even if nothing is written

    @property
    def name(self) -> str:
        """The URL."""
        return self._location.shown

    def write(self, content: Any) -> int:
        self._is_sent = False
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        self._is_sent = False
        return super().truncate(size)

    def flush(self) -> None:
        """Send what has been written so far."""
        super().flush()
        if not self._is_sent:
            self._location.make_parents()
            tried(self._location, lambda: self._location.system.put_file(self._copy.name, self._location.inner))
            self._is_sent = True

    def discard(self) -> None:
        """Close without sending anything more."""
        self._is_sent = True
        self.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.discard() if kind is not None else self.close()


class _TextUpload(io.TextIOWrapper):
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self.buffer.discard()  # type: ignore[attr-defined]
        else:
            self.close()


def _copy(content: Content, file: IO[bytes]) -> None:
    if isinstance(content, str):
        file.write(content.encode())
    elif isinstance(content, bytes | bytearray | memoryview):
        file.write(content)
    else:
        while part := content.read(1 << 20):
            file.write(part.encode() if isinstance(part, str) else part)


def _entry(found: dict[str, Any], path: str) -> Entry:
    """What an fsspec file system says of a file; each has another name and form for the time."""
    when = next(
        (found[name] for name in ("mtime", "updated", "LastModified", "last_modified") if found.get(name)), None
    )
    when = found.get("created") if when is None else when
    if isinstance(when, str):
        when = datetime.datetime.fromisoformat(when)
    if isinstance(when, datetime.datetime):
        when = when.timestamp()
    is_folder = found["type"] == "directory"
    return Entry(
        path, 0 if is_folder else int(found.get("size") or 0), None if when is None else float(when), is_folder
    )
