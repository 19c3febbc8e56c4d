"""Tensors in parts, over several safetensors files.

A file has at most one part of each tensor, under the tensor's name, and says in its metadata where each part begins, in
the words of `torch.distributed.checkpoint`, whose `HuggingFaceStorageReader` reads such files too. Owns these files.
Which files make up a checkpoint is in `manifest` and `files`.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from xlatrainer.backend.transfer import Part
from xlatrainer.encoding import as_stored, from_stored
from xlatrainer.errors import CheckpointError
from xlatrainer.storage.publishing import flush_file

__all__ = ["PartFiles", "StoredTensor", "save_tensors", "write_parts"]

_OFFSETS = "DCP_SHARDING_INFO"
_VERSION = {"DCP_VERSION": "1.0", "format": "pt"}
_PAIRS = "complex128"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file of these CPU tensors, on the disk when this returns."""
    stored, about = as_stored(tensors)
    save_file(stored, path, {**metadata, **about})
    flush_file(path)


def write_parts(
    folder: Path, stem: str, tensors: Mapping[str, Sequence[Part]], metadata: Mapping[str, str]
) -> list[str]:
    """Write parts of tensors to as many files as there are parts of one tensor at most, on the disk afterwards.

    Args:
        folder: Where.
        stem: How their names begin.
        tensors: The parts by name.
        metadata: Of each file.

    Returns:
        Their names.
    """
    names = []
    for number in range(max((len(parts) for parts in tensors.values()), default=0)):
        parts = {name: parts[number] for name, parts in tensors.items() if len(parts) > number}
        offsets = {
            name: {"saved_offsets": [*part.offsets, *([0] if part.tensor.dtype is torch.complex128 else [])]}
            for name, part in parts.items()
        }
        names.append(f"{stem}-{number}.safetensors")
        about = {**metadata, **_VERSION, _OFFSETS: json.dumps(offsets)}
        save_tensors(folder / names[-1], {name: part.tensor for name, part in parts.items()}, about)
    return names


@dataclass(frozen=True)
class _Stored:
    """A part in a file."""

    file: Any
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def box(self) -> tuple[slice, ...]:
        """Where in the tensor it belongs."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as safetensors files have it.

    Attributes:
        dtype: In safetensors' words, "F32" for example.
        shape: In elements.
        nbytes: Its size.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class PartFiles:
    """The tensors of several files, put together one at a time. A context manager: the files are open meanwhile.

    Files without offsets hold whole tensors.

    Args:
        paths: All files, which together have all parts.
        shown: The folder, for messages.

    Attributes:
        metadata: What the files say besides.

    Raises:
        CheckpointError: For a file that is no safetensors file, and if parts are missing or do not fit together.
    """

    def __init__(self, paths: Sequence[Path], shown: str) -> None:
        self.metadata: dict[str, str] = {}
        self._shown = shown
        self._parts: dict[str, list[_Stored]] = {}
        self._pairs: set[str] = set()
        with contextlib.ExitStack() as opened:
            for path in paths:
                try:
                    self._add(opened.enter_context(safetensors.safe_open(path, framework="pt")), path)
                except safetensors.SafetensorError as error:
                    raise CheckpointError(f"{shown}/{path.name} is damaged: {error}") from error
            self._about = {name: self._put_together(name, parts) for name, parts in sorted(self._parts.items())}
            self._open = opened.pop_all()

    def _add(self, file: Any, path: Path) -> None:
        metadata = dict(file.metadata() or {})
        offsets = json.loads(metadata.pop(_OFFSETS, "{}"))
        self._pairs.update(json.loads(metadata.pop(_PAIRS, "[]")))
        self.metadata.update({key: value for key, value in metadata.items() if key not in _VERSION})
        for name, about in _header(path).items():
            begin = offsets[name]["saved_offsets"] if name in offsets else [0] * len(about["shape"])
            first, last = about["data_offsets"]
            found = _Stored(file, tuple(begin), tuple(about["shape"]), about["dtype"], last - first)
            self._parts.setdefault(name, []).append(found)

    def _put_together(self, name: str, parts: Sequence[_Stored]) -> StoredTensor:
        if len({(len(part.shape), part.dtype) for part in parts}) == 1:
            shape = tuple(max(side.stop for side in sides) for sides in zip(*(part.box for part in parts), strict=True))
            if sum(math.prod(part.shape) for part in parts) == math.prod(shape):
                return StoredTensor(parts[0].dtype, shape, sum(part.nbytes for part in parts))
        raise CheckpointError(f"{self._shown} is damaged: the {len(parts)} parts of {name} are not the whole of it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def about(self) -> dict[str, StoredTensor]:
        """What there is, by name."""
        return dict(self._about)

    def stored(self, name: str) -> Tensor:
        """A tensor as the files have it: one of complex128 as pairs of floats."""
        parts = self._parts[name]
        first = parts[0].file.get_tensor(name)
        if len(parts) == 1:
            return first
        whole = torch.empty(self._about[name].shape, dtype=first.dtype)
        into = whole.view(torch.uint8).numpy()  # numpy copies on this thread; torch's threads wait for busy cores
        for part in parts:
            *box, last = part.box
            last = slice(last.start * first.element_size(), last.stop * first.element_size())
            into[(*box, last)] = part.file.get_tensor(name).view(torch.uint8).numpy()
        return whole

    @property
    def pairs(self) -> dict[str, str]:
        """The metadata that says which tensors are of complex128, for `from_stored`."""
        return {_PAIRS: json.dumps(sorted(self._pairs))} if self._pairs else {}

    def tensors(self) -> dict[str, Tensor]:
        """All of them, on the CPU."""
        return from_stored({name: self.stored(name) for name in self._about}, self.pairs)


def _header(path: Path) -> dict[str, Any]:
    """What a file that safetensors has opened says of its tensors: a length of 8 bytes, and JSON."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header
