"""One checkpoint: a folder of four files, written whole and checked when it is read.

    model.safetensors  the weights, as any program that knows safetensors reads them; tied weights once
    state.json         all else, without its tensors
    state.safetensors  the tensors of `state.json`
    manifest.json      the format, size and SHA-256 of the other files, and what a list of checkpoints shows

Owns the format. What the state means is the business of `trainer.checkpoint`, where it is kept that of `places`.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from xlatrainer.encoding import as_stored, decode, from_stored
from xlatrainer.errors import CheckpointError
from xlatrainer.trainer.checkpoints.places import MANIFEST, Place, place_of

__all__ = ["FORMAT", "Content", "read_checkpoint", "read_manifest", "read_weights", "write_checkpoint", "write_weights"]

FORMAT = 2
_WEIGHTS, _STATE, _TENSORS = "model.safetensors", "state.json", "state.safetensors"


@dataclass
class Content:
    """What a checkpoint holds.

    Attributes:
        weights: The model's tensors on the CPU by name, tied ones under one of their names.
        tied: The other names of tied weights, each with the name in `weights`.
        state: What `encode` made of the rest.
        tensors: Those that `state` speaks of, on the CPU.
        about: Plain data for the manifest: what is looked at without reading the rest.
    """

    weights: dict[str, Tensor]
    tied: dict[str, str]
    state: Any
    tensors: Sequence[Tensor]
    about: dict[str, Any] = field(default_factory=dict)

    def decoded(self) -> Any:
        """The state, with its tensors."""
        return decode(self.state, self.tensors)


def write_checkpoint(path: str | os.PathLike[str], content: Content) -> None:
    """Write `content` to the folder `path`, whole or not at all, even if the process is killed meanwhile.

    Args:
        path: A folder, or a URL that fsspec knows; its parents are made if need be. A checkpoint there is replaced.
        content: What to write.

    Raises:
        CheckpointError: If it cannot be written, because the disk is full, say; what was there before is untouched.
        FileExistsError: If `path` is a folder that holds something else.
    """
    place = place_of(path)

    def write(folder: Path) -> None:
        write_weights(folder / _WEIGHTS, content.weights, content.tied)
        _save_tensors(folder / _TENSORS, {str(i): tensor for i, tensor in enumerate(content.tensors)}, {})
        _write_text(folder / _STATE, json.dumps(content.state, allow_nan=False))
        files = {name: _fingerprint(folder / name) for name in (_WEIGHTS, _STATE, _TENSORS)}
        manifest = {"format": FORMAT, "about": content.about, "files": files}
        manifest["sha256"] = _digest_of(manifest)
        _write_text(folder / MANIFEST, json.dumps(manifest, indent=1))

    try:
        place.publish(write)
    except FileExistsError:
        raise
    except (OSError, safetensors.SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in [*content.weights.values(), *content.tensors])
        raise CheckpointError(
            f"the checkpoint {place} could not be written: {error}. It takes {size / 1e6:,.1f} MB. Nothing "
            f"half-written is left behind, and what was saved before is as it was"
        ) from error


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the manifest of the checkpoint at `path` says about it; the other files are not looked at.

    Raises:
        CheckpointError: If it is damaged.
        FileNotFoundError: If there is none.
    """
    return dict(_manifest_of(place_of(path))["about"])


def read_checkpoint(path: str | os.PathLike[str]) -> Content:
    """The checkpoint in the folder `path`, on the CPU, all of its files checked. Executes no code, whatever is in it.

    Raises:
        CheckpointError: If a file is missing or is not what was written; the message names it.
        FileNotFoundError: If there is no checkpoint.
    """
    place = place_of(path)
    manifest = _manifest_of(place)
    with place.opened() as folder:
        for name, expected in manifest["files"].items():
            _check_file(folder / name, expected, f"{place}/{name}")
        weights, tied = read_weights(folder / _WEIGHTS)
        named = _load_tensors(folder / _TENSORS)[0]
        tensors = [named[str(number)] for number in range(len(named))]
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    return Content(weights, tied, state, tensors, manifest["about"])


def write_weights(path: Path, weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """A safetensors file of these CPU tensors, on the disk when this returns."""
    metadata = {"format": "pt"}  # what Hugging Face's loaders look for
    if tied:
        metadata["tied"] = json.dumps(dict(tied))
    _save_tensors(path, weights, metadata)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and the further names of tied ones if the file has a list of them."""
    tensors, metadata = _load_tensors(path)
    return tensors, json.loads(metadata.get("tied", "{}"))


def _save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    stored, about = as_stored(tensors)
    save_file(stored, path, {**metadata, **about})
    _flush(path)


def _load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
    return from_stored(load_file(path), metadata), metadata


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _manifest_of(place: Place) -> dict[str, Any]:
    """The manifest of a checkpoint, checked against its own hash."""
    shown = str(place)
    try:
        manifest = json.loads(place.manifest())
    except ValueError as error:
        raise CheckpointError(f"{shown}/{MANIFEST} is damaged: it is no JSON ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise CheckpointError(f"{shown}/{MANIFEST} was not written by xlatrainer: it names no format")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{shown} has format {manifest['format']}, this xlatrainer reads format {FORMAT} and the single files of "
            f"format 1; use the xlatrainer that wrote it"
        )
    stated = manifest.pop("sha256", None)
    if stated != _digest_of(manifest):
        raise CheckpointError(f"{shown}/{MANIFEST} is damaged: its contents do not have the hash that it states")
    return manifest


def _check_file(path: Path, expected: Mapping[str, Any], shown: str) -> None:
    if not path.is_file():
        raise CheckpointError(f"{shown} is missing; the checkpoint is not whole")
    size = path.stat().st_size
    if size != expected["size"]:
        raise CheckpointError(f"{shown} is damaged: it has {size} bytes, {expected['size']} were written")
    if _fingerprint(path)["sha256"] != expected["sha256"]:
        raise CheckpointError(f"{shown} is damaged: its contents do not have the SHA-256 that was written down")
