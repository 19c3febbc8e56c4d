"""Files of weights alone: written for any program that reads safetensors, read from what others have written.

Owns which files and folders count as weights. Names and ties are the business of `weights`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from xlatrainer.errors import CheckpointError
from xlatrainer.storage.publishing import fetched, publish_file
from xlatrainer.trainer.checkpoints.files import open_weights, read_weights, write_weights
from xlatrainer.trainer.checkpoints.manifest import manifest_of
from xlatrainer.trainer.checkpoints.places import MANIFEST, place_of

__all__ = ["read_weight_files", "write_weight_file"]

_INDEX = ".safetensors.index.json"  # Hugging Face's list of which file has which weight
_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_ACCEPTED = (
    "a .safetensors file, a checkpoint's folder, a folder of .safetensors files as Hugging Face writes it, or a "
    "state dict that torch.save wrote (.pt, .pth, .bin)"
)


def write_weight_file(path: str | os.PathLike[str], weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all.

    Args:
        path: A path or URL.
        weights: CPU tensors by name.
        tied: Further names, each with the name in `weights`.

    Raises:
        CheckpointError: If it cannot be written; an older file is untouched.
    """
    try:
        publish_file(path, lambda file: write_weights(file, weights, tied))
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"the weights {os.fspath(path)} could not be written: {error}") from error


def read_weight_files(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights at `path`, on the CPU by name, and the further names of tied ones. Executes no code.

    Args:
        path: A path or URL of what `_ACCEPTED` says.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If it is something else.
        CheckpointError: If a file is damaged.
    """
    with fetched(path, (".safetensors", _INDEX, MANIFEST)) as local:
        if local.is_dir():
            return _read_folder(local, os.fspath(path))
        return _read_file(local, os.fspath(path))


def _read_folder(folder: Path, shown: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    if (folder / MANIFEST).is_file():
        with open_weights(folder, manifest_of(place_of(folder))["files"], shown) as stored:
            return stored.tensors(), json.loads(stored.metadata.get("tied", "{}"))
    files = [folder / "model.safetensors"]
    indices = sorted(folder.glob(f"*{_INDEX}"))
    if indices:
        index = json.loads(indices[0].read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{shown} holds no weights: it has no {', '.join(missing)}. Accepted: {_ACCEPTED}")
    weights: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for file in files:
        found, ties = _read_file(file, f"{shown}/{file.name}")
        weights.update(found)
        tied.update(ties)
    return weights, tied


def _read_file(file: Path, shown: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    if file.name.endswith(_PICKLED):
        held = torch.load(file, map_location="cpu", weights_only=True)
        state = held.get("model", held) if isinstance(held, dict) and "format" in held else held
        if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError(f"{shown} holds no weights by name. Accepted: {_ACCEPTED}")
        return dict(state), {}
    try:
        return read_weights(file)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{shown} is no safetensors file, or a damaged one: {error}") from error
