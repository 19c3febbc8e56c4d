"""Folders that appear whole or not at all, on this machine or behind any URL that fsspec knows.

Owns the rename, and the rule what may be deleted: only files of names that a checkpoint has, and half-written folders
only if the process that wrote them is dead. Knows nothing of what the files hold; single files are `storage`'s.

On a local disk a folder gets its name when all of it is on the disk. A remote store cannot rename a folder: there the
manifest is written last and removed first, and a folder without one counts as not there.

Several processes write into one folder, on a disk that they share: the first one makes it, and gives it its name when
all of them are done.
"""

import contextlib
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from xlatrainer.distributed.team import Team
from xlatrainer.storage.files import exists, list_folder, read, remove
from xlatrainer.storage.publishing import TEMPORARY, flush_folder, get_file, is_abandoned, put_file, temporary_name
from xlatrainer.storage.systems import Location, locate
from xlatrainer.trainer.checkpoints.together import together

__all__ = ["FILES", "MANIFEST", "Place", "place_of"]

MANIFEST = "manifest.json"
FILES = ("model.safetensors", "state.safetensors", "state.json", MANIFEST)  # of one process
_OWN = re.compile(  # all names that a checkpoint ever has
    r"(model|state)\.safetensors|(state|manifest)\.json"
    r"|(model|state)-\d{5}-of-\d{5}-\d+\.safetensors|local-\d{5}-of-\d{5}\.(json|safetensors)"
)
_UNFINISHED = re.compile(r"\.tmp\w{6}")  # what safetensors calls a file while it writes it
WriteShare = Callable[[Path], dict[str, Any]]
Finish = Callable[[Path, list[dict[str, Any]]], None]


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
    def publish_together(self, write: WriteShare, finish: Finish, team: Team) -> None:
        """As `publish`, by several processes.

        Args:
            write: Called in each of them: writes its files, and returns a report.
            finish: Called in the first one with the reports of all, when all have written: writes the manifest.
            team: The processes.

        Raises:
            CheckpointError: In all of them, if one of them fails. What was here before is untouched; behind a URL, it
                is gone if it was to be replaced.
        """

    @abstractmethod
    def opened(self, names: Collection[str]) -> contextlib.AbstractContextManager[Path]:
        """A local folder with those of the files `names` that there are, for the length of the block."""

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
    location = locate(path)
    if location.system is None:
        return _Local(Path(location.inner))
    return _Remote(replace(location, inner=location.inner.rstrip("/"), shown=location.shown.rstrip("/")))


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

    def _make_parents(self) -> None:
        if self._path.is_dir() and not self.holds_checkpoint() and any(self._path.iterdir()):
            raise FileExistsError(
                f"{self} is a folder that holds something else than a checkpoint; save under a name of its own in it"
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def publish(self, write: Callable[[Path], None]) -> None:
        self._make_parents()
        with temporary_name(self._path, "writing") as temporary:
            temporary.mkdir()
            try:
                write(temporary)
                flush_folder(temporary)
            except BaseException:
                _remove_own_files(temporary, unfinished=True)
                raise
            self._take(temporary)

    def publish_together(self, write: WriteShare, finish: Finish, team: Team) -> None:
        failed = f"the checkpoint {self} could not be written"
        is_first = team.index == 0
        with temporary_name(self._path, "writing") as own:

            def make() -> str:
                if is_first:
                    self._make_parents()
                    own.mkdir()
                return own.name

            temporary = self._path.with_name(together(team, make, failed)[0])

            def write_own() -> dict[str, Any]:
                if not temporary.is_dir():
                    raise FileNotFoundError(
                        "it does not see the folder that the first process has made; give a folder on a disk that all "
                        "processes share, or a URL"
                    )
                return write(temporary)

            def take() -> None:
                if is_first:
                    finish(temporary, reports)
                    flush_folder(temporary)
                    self._take(temporary)

            try:
                reports = together(team, write_own, failed)
                together(team, take, failed)
            except BaseException:
                if is_first and temporary.is_dir():
                    _remove_own_files(temporary, unfinished=True)
                raise

    def _take(self, temporary: Path) -> None:
        """Give the whole folder at `temporary` this name."""
        if not os.path.lexists(self._path):
            os.rename(temporary, self._path)
            flush_folder(self._path.parent)
            return
        with temporary_name(
            self._path, "replaced"
        ) as old:  # a killed process leaves it there, and `clean` puts it back
            os.rename(self._path, old)
            os.rename(temporary, self._path)
            flush_folder(self._path.parent)
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
    def opened(self, names: Collection[str]) -> Iterator[Path]:
        yield self._path

    def remove(self) -> None:
        with temporary_name(self._path, "deleting") as temporary:
            os.rename(self._path, temporary)
            _remove_own_files(temporary)

    def remove_file(self) -> None:
        self._path.unlink(missing_ok=True)

    def clean(self) -> list[str]:
        if not self._path.is_dir():
            return []
        removed = []
        for entry in sorted(self._path.iterdir()):
            left = TEMPORARY.fullmatch(entry.name)
            if left is None or not is_abandoned(left["host"], int(left["pid"]), entry.name):
                continue
            target = self._path / left["name"]
            if left["kind"] == "replaced" and not os.path.lexists(target):
                os.rename(entry, target)
                continue
            if entry.is_dir():
                _remove_own_files(entry, unfinished=left["kind"] == "writing")
            else:
                entry.unlink()
            removed.append(entry.name)
        return removed


class _Remote(Place):
    def __init__(self, location: Location) -> None:
        self._location = location

    def __str__(self) -> str:
        return self._location.shown

    @property
    def name(self) -> str:
        return self._location.inner.rpartition("/")[2]

    def _url_of(self, name: str) -> str:
        return f"{self._location.shown}/{name}"

    def child(self, name: str) -> "_Remote":
        location = self._location
        return _Remote(replace(location, inner=f"{location.inner}/{name}", shown=self._url_of(name)))

    def children(self) -> list[str]:
        try:
            return [entry.name for entry in list_folder(self._location.shown) if entry.isdir]
        except FileNotFoundError:
            return []

    def holds_checkpoint(self) -> bool:
        return exists(self._url_of(MANIFEST))

    def publish(self, write: Callable[[Path], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="xlatrainer-") as folder:
            write(Path(folder))
            if self.holds_checkpoint():
                remove(self._url_of(MANIFEST))
            for name in FILES:  # the manifest is the last of them
                put_file(os.path.join(folder, name), self._url_of(name))

    def publish_together(self, write: WriteShare, finish: Finish, team: Team) -> None:
        failed = f"the checkpoint {self} could not be written"
        with tempfile.TemporaryDirectory(prefix="xlatrainer-") as folder:

            def begin() -> None:
                if team.index == 0 and self.holds_checkpoint():
                    self.remove()

            def write_own() -> dict[str, Any]:
                report = write(Path(folder))
                for name in sorted(os.listdir(folder)):
                    put_file(os.path.join(folder, name), self._url_of(name))
                return report

            def end() -> None:
                if team.index == 0:
                    finish(Path(folder), reports)
                    put_file(os.path.join(folder, MANIFEST), self._url_of(MANIFEST))

            together(team, begin, failed)
            reports = together(team, write_own, failed)
            together(team, end, failed)

    def manifest(self) -> bytes:
        if not self.holds_checkpoint():
            raise FileNotFoundError(f"{self} is no checkpoint: it has no {MANIFEST}")
        return read(self._url_of(MANIFEST))

    @contextlib.contextmanager
    def opened(self, names: Collection[str]) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="xlatrainer-") as folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # a missing file is reported by who knows the manifest
                    get_file(self._url_of(name), os.path.join(folder, name))
            yield Path(folder)

    def remove(self) -> None:
        found: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            found = [entry.name for entry in list_folder(self._location.shown) if _OWN.fullmatch(entry.name)]
        for name in sorted(found, key=lambda name: name != MANIFEST):  # which is what makes it a checkpoint
            with contextlib.suppress(FileNotFoundError):
                remove(self._url_of(name))
        if not self._location.is_object_store:
            with contextlib.suppress(OSError):  # a folder that holds something else stays
                self._location.system.rmdir(self._location.inner)

    def remove_file(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            remove(self._location.shown)

    def clean(self) -> list[str]:
        return []  # nothing tells whether the process that writes a folder is alive: it may be on another machine


def _remove_own_files(folder: Path, others_to: Path | None = None, *, unfinished: bool = False) -> None:
    """Delete a checkpoint's files in `folder`, and `folder` if nothing else is in it or all else can be moved.

    Args:
        folder: Under a name that hides it.
        others_to: Where to move what is none of the checkpoint's files; default None, it stays.
        unfinished: Whether the folder was never whole, so that what safetensors had begun to write goes too.
    """
    for entry in list(folder.iterdir()):
        if _OWN.fullmatch(entry.name) or (unfinished and _UNFINISHED.fullmatch(entry.name)):
            entry.unlink(missing_ok=True)
    others = list(folder.iterdir())
    if others_to is not None:
        for other in others:
            os.rename(other, others_to / other.name)
    elif others:
        return
    folder.rmdir()
