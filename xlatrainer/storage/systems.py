"""Which file system a path or URL names, and how its operations are tried.

Google Cloud Storage (`gs://`) goes through gcsfs, everything else through what fsspec knows; local files need neither.
Owns credentials, retries and the words of errors. Knows no operation.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from xlatrainer import config
from xlatrainer.optional import require

__all__ = ["Location", "Path", "explained", "locate", "locate_file", "remote", "tried"]

Path = str | os.PathLike[str]
Result = TypeVar("Result")

ATTEMPTS = 5
FIRST_PAUSE = 0.5  # seconds; doubled after every attempt
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
# Stores of objects: their libraries retry each request, and they have no folders to be made, only buckets.
_OBJECT_STORES = {"gs", "gcs", "s3", "s3a", "abfs", "abfss", "az"}
_GOOGLE = ("gs://", "gcs://")


@dataclass(frozen=True)
class Location:
    """A path in a file system.

    Attributes:
        system: The fsspec file system; None for files of this machine.
        inner: The path as `system` has it, or the local path.
        shown: The path or URL as it was given, for messages.
    """

    system: Any
    inner: str
    shown: str

    @property
    def is_google(self) -> bool:
        """Whether this is an object of Google Cloud Storage."""
        return self.shown.startswith(_GOOGLE)

    @property
    def is_object_store(self) -> bool:
        """Whether it has no folders but those that the names of objects spell, and retries by itself."""
        if self.system is None:
            return False
        protocol = self.system.protocol
        return not _OBJECT_STORES.isdisjoint((protocol,) if isinstance(protocol, str) else protocol)

    def make_parents(self) -> None:
        """Make the folder of this path; where there are none, a missing bucket is left missing."""
        parent = self.inner.rstrip("/").rpartition("/")[0]
        if self.system is None:
            os.makedirs(parent or ".", exist_ok=True)
        elif not self.is_object_store:
            tried(self, lambda: self.system.makedirs(parent, exist_ok=True))


def locate(path: Path) -> Location:
    """The file system of a local path or a URL, and the path in it.

    A file system is asked for anew at each use, never kept: fsspec keeps one a process, and a forked process must not
    use its parent's.

    Raises:
        ImportError: If the library for that kind of URL is not installed; the message has the command, or names it.
        ValueError: If `path` is no URL that fsspec knows, or a URL that pathlib has changed.
    """
    text = os.fspath(path)
    if "://" not in text:
        if not isinstance(path, str) and re.match(r"[a-z][a-z0-9+.-]+:/", text):
            raise ValueError(f"{text!r} was a URL until pathlib took a slash out of it; give the URL as a string")
        return Location(None, text, text)
    if text.startswith(_GOOGLE):
        bucket = text.partition("://")[2].partition("/")[0]
        if not bucket:
            raise ValueError(f"{text!r} names no bucket; the form is gs://BUCKET_NAME/PATH")
        gcsfs = require("gcsfs.core", "gs://", 'pip install "xlatrainer[gcs]"')
        if config.get("storage_emulator"):
            # The class that gcsfs registers asks for a bucket's kind by gRPC, which emulators do not speak: a minute of
            # waiting. Without credentials they get none, instead of a search for some.
            token = None if config.get("google_credentials") else "anon"
            return Location(gcsfs.GCSFileSystem(token=token), text.partition("://")[2], text)
    system, inner = fsspec.url_to_fs(text)
    if isinstance(system, LocalFileSystem):
        return Location(None, inner, text)
    return Location(system, inner, text)


def locate_file(path: Path) -> Location:
    """`locate`, but of what can be a file; raises `ValueError` for a bucket, and for a URL that ends with a slash."""
    location = locate(path)
    if location.system is not None:
        is_bucket = location.is_object_store and "/" not in location.inner
        if is_bucket or location.shown.endswith("/"):
            raise ValueError(
                f"{location.shown!r} is no file, but a bucket or folder; the form is gs://BUCKET_NAME/PATH"
            )
    return location


def remote(path: Path) -> Location:
    """`locate`, but of a URL only; raises `ValueError` for a path without a scheme."""
    if "://" not in os.fspath(path):
        raise ValueError(
            f"{os.fspath(path)!r} is no URL; the form is gs://BUCKET_NAME/PATH, or another that fsspec knows"
        )
    return locate(path)


def tried(location: Location, operation: Callable[[], Result]) -> Result:
    """The result of `operation`, which may be repeated; with retries, and errors that say what is wrong.

    Transient are connections that break or time out, and the HTTP statuses 408, 429, 500, 502, 503 and 504. They are
    tried 5 times, with pauses of about 0.5, 1, 2 and 4 seconds. The libraries for Google's, Amazon's and Azure's
    storage retry each request themselves (gcsfs 6 times within about half a minute); these are tried once.

    Raises:
        FileNotFoundError: If the file or its bucket does not exist; the message says which.
        PermissionError: If the store refuses access; the message says where credentials come from.
    """
    with explained(location):
        attempts = 1 if location.system is None or location.is_object_store else ATTEMPTS
        pause = FIRST_PAUSE
        for _ in range(attempts - 1):
            try:
                return operation()
            except Exception as error:
                if not _is_transient(error):
                    raise
            time.sleep(pause * random.uniform(0.75, 1.25))  # many processes that failed at once come back one by one
            pause *= 2
        return operation()


@contextlib.contextmanager
def explained(location: Location) -> Iterator[None]:
    """Errors of a store in this block name the URL and say what is wrong; those of local files do so by themselves."""
    try:
        yield
    except Exception as error:
        if location.system is None:
            raise
        status = _status_of(error)
        if isinstance(error, FileNotFoundError) or status == 404:
            raise FileNotFoundError(_what_is_missing(location)) from error
        forbidden = isinstance(error, OSError) and str(error).startswith("Forbidden")  # how gcsfs says it
        if isinstance(error, PermissionError) or forbidden or status in (401, 403):
            raise PermissionError(
                f"access to {location.shown} is refused: {error}. {_credentials(location)}"
            ) from error
        raise


def _what_is_missing(location: Location) -> str:
    bucket = location.inner.partition("/")[0]
    if location.is_google and not location.system.exists(bucket):
        return f"{location.shown} does not exist: there is no bucket {bucket!r}, or it is not for you to see"
    return f"{location.shown} does not exist"


def _credentials(location: Location) -> str:
    if not location.is_google:
        return "See fsspec's documentation of that store for where it takes credentials from"
    used = config.get("google_credentials")
    return f"Credentials are those of {used}" if used else "Set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials"


def _status_of(error: BaseException) -> int | None:
    """The HTTP status that an error carries, as gcsfs (`code`) and aiohttp (`status`) have it."""
    for name in ("status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int | str) and str(value).isdigit():
            return int(value)
    return None


def _is_transient(error: Exception) -> bool:
    aiohttp = sys.modules.get("aiohttp")  # errors of its own exist only where it was imported
    if aiohttp is not None and isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError):
        return True
    return isinstance(error, ConnectionError | TimeoutError) or _status_of(error) in _TRANSIENT_STATUS
