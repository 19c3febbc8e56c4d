"""`manifest.json`: which files a checkpoint has, with sizes and SHA-256, and what is looked at without reading them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xlatrainer.errors import CheckpointError
from xlatrainer.storage.publishing import flush_file
from xlatrainer.trainer.checkpoints.places import MANIFEST, Place

__all__ = [
    "IN_PARTS",
    "WHOLE",
    "check_file",
    "check_size",
    "fingerprint",
    "manifest_of",
    "write_manifest",
    "write_text",
]

WHOLE = 2  # the format of one process
IN_PARTS = 3  # and that of several
Fingerprint = Mapping[str, Any]


def write_text(path: Path, text: str) -> None:
    """A file of text, on the disk when this returns."""
    path.write_text(text, encoding="utf-8")
    flush_file(path)


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, format: int, about: Mapping[str, Any], files: Mapping[str, Fingerprint]) -> None:
    """Write the manifest of a checkpoint of these files, by name."""
    manifest = {"format": format, "about": about, "files": files}
    write_text(folder / MANIFEST, json.dumps({**manifest, "sha256": _digest_of(manifest)}, indent=1))


def manifest_of(place: Place) -> dict[str, Any]:
    """The manifest of a checkpoint, checked against its own hash: "format", "about" and "files".

    Raises:
        CheckpointError: If it is damaged, or of another format.
        FileNotFoundError: If there is none.
    """
    shown = str(place)
    try:
        manifest = json.loads(place.manifest())
    except ValueError as error:
        raise CheckpointError(f"{shown}/{MANIFEST} is damaged: it is no JSON ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise CheckpointError(f"{shown}/{MANIFEST} was not written by xlatrainer: it names no format")
    if manifest["format"] not in (WHOLE, IN_PARTS):
        raise CheckpointError(
            f"{shown} has format {manifest['format']}, this xlatrainer reads formats {WHOLE} and {IN_PARTS} and the "
            f"single files of format 1; use the xlatrainer that wrote it"
        )
    stated = manifest.pop("sha256", None)
    if stated != _digest_of(manifest):
        raise CheckpointError(f"{shown}/{MANIFEST} is damaged: its contents do not have the hash that it states")
    return manifest


def check_size(path: Path, expected: Fingerprint, shown: str) -> None:
    """Raise if a file is missing or has another size than was written."""
    if not path.is_file():
        raise CheckpointError(f"{shown} is missing; the checkpoint is not whole")
    size = path.stat().st_size
    if size != expected["size"]:
        raise CheckpointError(f"{shown} is damaged: it has {size} bytes, {expected['size']} were written")


def check_file(path: Path, expected: Fingerprint, shown: str) -> None:
    """Raise if a file is not what was written."""
    check_size(path, expected, shown)
    if fingerprint(path)["sha256"] != expected["sha256"]:
        raise CheckpointError(f"{shown} is damaged: its contents do not have the SHA-256 that was written down")


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
