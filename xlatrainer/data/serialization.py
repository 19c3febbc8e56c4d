"""Tensors saved and loaded one at a time, so that the host never holds all of them.

    PATH                         the structure: JSON, with numbers in place of tensors
    PATH.tensors/tensor_0.pt     each tensor, as `torch.save` writes it

Loading executes no code. What PyTorch/XLA's `serialization.save` wrote, whose structure is a file of `torch.save`, is
loaded too. Owns these layouts; which Python types a structure may hold is the business of `encoding`.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path as LocalPath
from typing import Any

import torch
from torch import Tensor

from xlatrainer import storage
from xlatrainer.backend.device import sync
from xlatrainer.data.replicas import is_writer
from xlatrainer.data.saving import identity_of
from xlatrainer.encoding import TensorTable, decode, encode
from xlatrainer.errors import CheckpointError
from xlatrainer.storage.publishing import fetched, publish_file
from xlatrainer.storage.systems import Path

__all__ = ["load", "save"]

_FORMAT = 1
_ZIP = b"PK"  # what files of torch.save begin with
_PEER_REFERENCE = "torch_xla.utils.serialization.TensorReference"


def save(data: Any, path: Path, master_only: bool = True, global_master: bool = False) -> None:
    """Save a nest of tensors, which go to the CPU and into a file of their own one after another.

    The host needs memory for one tensor. Tensors that occur several times, and tied weights, are saved once, and are
    one tensor when they are loaded. What was saved at `path` before is removed first; the file at `path` comes last, so
    that a process that is killed meanwhile leaves nothing that loads.

    Args:
        data: Tensors, arrays, numbers, strings, bytes, None, dtypes, and lists, tuples, sets and dicts of them. Kinds
            of dict become dict, Parameters tensors.
        path: A path or URL; the tensors go into the folder `PATH.tensors`.
        master_only: Whether only one process writes. Default True. Otherwise each process needs a path of its own.
        global_master: With `master_only`, whether that is one of all machines (True) or one of each (default). All
            processes must call `save`; the others compute what is pending and do not wait for the files.

    Raises:
        TypeError: For other types in `data`: only executing code could load them.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "model")
        >>> save({"weight": torch.ones(2, device="xla"), "step": 3}, path)
        >>> load(path), os.listdir(path + ".tensors")
        ({'weight': tensor([1., 1.]), 'step': 3}, ['tensor_0.pt'])
    """
    if not is_writer(master_only, global_master):
        sync()
        return
    table = _SharedTensors()
    tree = encode(data, table, "data")
    folder = _folder_of(path)
    for remove, old in ((storage.remove, path), (storage.remove_tree, folder)):
        if storage.exists(old):
            remove(old)
    storage.make_folder(folder)
    for number, tensor in enumerate(table.tensors):
        _write_tensor(tensor, storage.join(folder, f"tensor_{number}.pt"))
    about = {"format": _FORMAT, "tensors": len(table.tensors), "tree": tree}
    storage.write(path, json.dumps(about, allow_nan=False))


def load(path: Path) -> Any:
    """What `save` was given, with its tensors on the CPU. They are read one after another, and no code is executed.

    Args:
        path: A path or URL; what PyTorch/XLA's `serialization.save` wrote will do, if it is a nest of dicts, lists and
            tuples.

    Raises:
        CheckpointError: If a file is damaged, missing, or was not written by `save`; the message names it.
        FileNotFoundError: If there is nothing at `path`.
    """
    shown = os.fspath(path)
    content = storage.read(path)
    if content.startswith(_ZIP):
        return _load_peer(content, path)
    try:
        about = json.loads(content)
        known = about["format"] == _FORMAT
    except (ValueError, TypeError, KeyError):
        raise CheckpointError(f"{shown} was not written by xlatrainer's serialization.save, or is damaged") from None
    if not known:
        raise CheckpointError(f"{shown} has format {about['format']}, this xlatrainer reads format {_FORMAT}")
    folder = _folder_of(path)
    return decode(about["tree"], [_read_tensor(folder, number) for number in range(about["tensors"])])


class _TensorReference:
    """Stands for a tensor in what PyTorch/XLA wrote.

    Attributes:
        tid: Its number.
    """

    tid: int


def _load_peer(content: bytes, path: Path) -> Any:
    """What PyTorch/XLA wrote; only its reference to a tensor and what `torch.load` holds to be safe is unpickled."""
    try:
        with torch.serialization.safe_globals([(_TensorReference, _PEER_REFERENCE)]):
            tree = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{os.fspath(path)} is damaged, or holds more than tensors and plain data: {error}"
        ) from error
    tensors: dict[int, Tensor] = {}

    def filled(value: Any) -> Any:
        if isinstance(value, _TensorReference):
            if value.tid not in tensors:
                tensors[value.tid] = _read_tensor(_folder_of(path), value.tid)
            return tensors[value.tid]
        if isinstance(value, dict):
            return type(value)((key, filled(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return type(value)(filled(item) for item in value)
        return value

    return filled(tree)


class _SharedTensors(TensorTable):
    """Numbers each part of memory once, whatever tensors speak of it."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[Any, ...], int] = {}

    def number(self, tensor: Tensor) -> int:
        key = identity_of(tensor)
        if key not in self._known:
            self._known[key] = super().number(tensor)
        return self._known[key]


def _folder_of(path: Path) -> str:
    return f"{os.fspath(path)}.tensors"


def _write_tensor(tensor: Tensor, path: str) -> None:
    copy = tensor.detach().cpu()
    if copy.untyped_storage().nbytes() != copy.nbytes:
        copy = copy.clone()  # torch.save would write all of the memory that a view is a part of

    def write(temporary: LocalPath) -> None:
        torch.save(copy, temporary)

    publish_file(path, write, flush=False)


def _read_tensor(folder: str, number: int) -> Tensor:
    path = storage.join(folder, f"tensor_{number}.pt")
    try:
        with fetched(path, ()) as file:
            tensor = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path} holds no tensor, but a {type(tensor).__name__}")
    return tensor
