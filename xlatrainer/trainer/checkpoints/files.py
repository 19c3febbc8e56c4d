"""One checkpoint: a folder of files, written whole and checked when it is read.

    model.safetensors  the weights, as any program that knows safetensors reads them; tied weights once
    state.json         all else, without its tensors
    state.safetensors  the tensors of `state.json`
    manifest.json      the format, size and SHA-256 of the other files, and what a list of checkpoints shows

That is what a process writes that has the whole model. Of several that have parts of it, process 1 of 4 writes

    model-00001-of-00004-0.safetensors  its parts of the weights, in as many files as it has parts of one tensor
    state-00001-of-00004-0.safetensors  its parts of the tensors of `state.json`, which the first process writes
    local-00001-of-00004.json           what only it knows: its place in the data, its random states
    local-00001-of-00004.safetensors    the tensors of that

Owns the format. What the state means is the business of `trainer.checkpoint`, where it is kept that of `places`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file
from torch import Tensor

from xlatrainer.backend.transfer import Part
from xlatrainer.distributed.team import Team
from xlatrainer.encoding import decode, from_stored
from xlatrainer.errors import CheckpointError
from xlatrainer.trainer.checkpoints.manifest import (
    IN_PARTS,
    WHOLE,
    check_file,
    check_size,
    fingerprint,
    manifest_of,
    write_manifest,
    write_text,
)
from xlatrainer.trainer.checkpoints.parts import PartFiles, save_tensors, write_parts
from xlatrainer.trainer.checkpoints.places import place_of
from xlatrainer.trainer.checkpoints.together import together

__all__ = [
    "Content",
    "Share",
    "open_weights",
    "read_checkpoint",
    "read_manifest",
    "read_weights",
    "write_checkpoint",
    "write_share",
    "write_weights",
]

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


@dataclass
class Share:
    """What one of several processes saves of a checkpoint.

    Attributes:
        weights: Its parts of the model's tensors by name.
        tied: As in `Content`; of this and what follows, the first process's counts.
        state: What `encode` made of what all processes have alike.
        tensors: Its parts of the tensors that `state` speaks of.
        about: As in `Content`.
        local: What `encode` made of the process's own entries of the state.
        local_tensors: Those that `local` speaks of, numbered on from `tensors`.
        is_finite: Whether its parts of the weights are.
    """

    weights: dict[str, list[Part]]
    tied: dict[str, str]
    state: dict[str, Any]
    tensors: list[list[Part]]
    about: dict[str, Any]
    local: dict[str, Any]
    local_tensors: Sequence[Tensor]
    is_finite: bool


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
        save_tensors(folder / _TENSORS, {str(i): tensor for i, tensor in enumerate(content.tensors)}, {})
        write_text(folder / _STATE, json.dumps(content.state, allow_nan=False))
        files = {name: fingerprint(folder / name) for name in (_WEIGHTS, _STATE, _TENSORS)}
        write_manifest(folder, WHOLE, content.about, files)

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


def write_share(path: str | os.PathLike[str], share: Share, team: Team) -> None:
    """As `write_checkpoint`, by several processes at once, each of which gives its share of the checkpoint.

    Args:
        path: A folder on a disk that all of them share, or a URL.
        share: This process's.
        team: The processes.

    Raises:
        CheckpointError: In all of them, if one of them cannot write.
    """
    who = f"{team.index:05d}-of-{team.count:05d}"

    def write(folder: Path) -> dict[str, Any]:
        tied = {"tied": json.dumps(share.tied)} if share.tied else {}
        names = write_parts(folder, f"model-{who}", share.weights, tied)
        numbered = {str(i): parts for i, parts in enumerate(share.tensors)}
        names += write_parts(folder, f"state-{who}", numbered, {})
        names += [f"local-{who}.safetensors", f"local-{who}.json"]
        first = len(share.tensors)
        save_tensors(folder / names[-2], {str(first + i): each for i, each in enumerate(share.local_tensors)}, {})
        write_text(folder / names[-1], json.dumps(share.local, allow_nan=False))
        if team.index == 0:
            names.append(_STATE)
            write_text(folder / _STATE, json.dumps(share.state, allow_nan=False))
        return {"files": {name: fingerprint(folder / name) for name in names}, "finite": share.is_finite}

    def finish(folder: Path, reports: Sequence[dict[str, Any]]) -> None:
        files = {name: found for report in reports for name, found in report["files"].items()}
        about = {**share.about, "finite": all(report["finite"] for report in reports), "processes": team.count}
        write_manifest(folder, IN_PARTS, about, files)

    place_of(path).publish_together(write, finish, team)


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the manifest of the checkpoint at `path` says about it; the other files are not looked at.

    Raises:
        CheckpointError: If it is damaged.
        FileNotFoundError: If there is none.
    """
    return dict(manifest_of(place_of(path))["about"])


def read_checkpoint(path: str | os.PathLike[str], team: Team | None = None) -> Content:
    """The checkpoint in the folder `path`, on the CPU, all of its files checked. Executes no code, whatever is in it.

    Args:
        path: A folder or URL, whoever and however many wrote it.
        team: Processes that all read it: each checks some of the files. Default None: this one reads it alone.

    Raises:
        CheckpointError: If a file is missing or is not what was written; the message names it.
        FileNotFoundError: If there is no checkpoint.
    """
    place = place_of(path)
    manifest = manifest_of(place)
    index, count = (0, 1) if team is None else (team.index, team.count)
    with place.opened(manifest["files"]) as folder:

        def check() -> None:
            for number, (name, expected) in enumerate(manifest["files"].items()):
                check_one = check_file if number % count == index else check_size
                check_one(folder / name, expected, f"{place}/{name}")

        if team is None:
            check()
        else:
            together(team, check, f"the checkpoint {place} could not be read")
        if manifest["format"] == IN_PARTS:
            return _read_parts(folder, manifest, str(place), index)
        weights, tied = read_weights(folder / _WEIGHTS)
        named = _load_tensors(folder / _TENSORS)[0]
        tensors = [named[str(number)] for number in range(len(named))]
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    return Content(weights, tied, state, tensors, manifest["about"])


def _read_parts(folder: Path, manifest: Mapping[str, Any], shown: str, index: int) -> Content:
    """What several processes wrote, with the own entries of process `index`, or of another where there were fewer."""
    with open_weights(folder, manifest["files"], shown) as files:
        weights, tied = files.tensors(), json.loads(files.metadata.get("tied", "{}"))
    with PartFiles(_beginning(folder, manifest["files"], "state-"), shown) as files:
        named = files.tensors()
    local = _beginning(folder, manifest["files"], "local-")
    number = index % manifest["about"]["processes"]
    texts, tensors = ([path for path in local if path.suffix == suffix] for suffix in (".json", ".safetensors"))
    named.update(_load_tensors(tensors[number])[0])
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    state.update(json.loads(texts[number].read_text(encoding="utf-8")))
    values = state.pop("values")
    if state["progress"] is not None:
        state["progress"]["values"] = values
    return Content(weights, tied, state, [named[str(i)] for i in range(len(named))], manifest["about"])


def open_weights(folder: Path, names: Sequence[str] | Mapping[str, Any], shown: str) -> PartFiles:
    """The weights of a checkpoint with these files, whether in parts or not."""
    return PartFiles(_beginning(folder, names, "model"), shown)


def _beginning(folder: Path, names: Sequence[str] | Mapping[str, Any], start: str) -> list[Path]:
    return [folder / name for name in sorted(names) if name.startswith(start) and name != _STATE]


def write_weights(path: Path, weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """A safetensors file of these CPU tensors, on the disk when this returns."""
    metadata = {"format": "pt"}  # what Hugging Face's loaders look for
    if tied:
        metadata["tied"] = json.dumps(dict(tied))
    save_tensors(path, weights, metadata)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and the further names of tied ones if the file has a list of them."""
    tensors, metadata = _load_tensors(path)
    return tensors, json.loads(metadata.get("tied", "{}"))


def _load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata() or {})
    return from_stored(load_file(path), metadata), metadata
