"""`save`: anything that `torch.save` takes, with its tensors on the CPU."""

from __future__ import annotations

import io
import os
import pickle
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from xlatrainer.backend.device import sync
from xlatrainer.data.replicas import is_writer
from xlatrainer.storage.publishing import published
from xlatrainer.storage.systems import Path

__all__ = ["identity_of", "save"]


def save(data: Any, file_or_path: Path | IO[bytes], master_only: bool = True, global_master: bool = False) -> None:
    """`torch.save` with all tensors on the CPU, so that `torch.load` needs neither xlatrainer nor the device.

    Tensors are found in whatever pickle finds: lists, dicts, sets, objects, modules. One that occurs several times, and
    tied weights, are one in the file too; views of a tensor that are not all of it become tensors of their own.
    `torch.load` reads what is made of tensors and plain containers; for other classes it asks for `weights_only=False`,
    which executes code.

    Args:
        data: What to save; stays as it is.
        file_or_path: A path or URL, where the file appears whole or not at all; or a file, open for writing bytes.
        master_only: Whether only one process writes. Default True. Otherwise each process needs a path of its own.
        global_master: With `master_only`, whether that is one of all machines (True) or one of each (default). All
            processes must call `save`; the others compute what is pending and do not wait for the file.

    Raises:
        FileNotFoundError: If the folder or bucket does not exist.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> save({"weight": torch.ones(2, device="xla"), "step": 3}, path)
        >>> torch.load(path)
        {'weight': tensor([1., 1.]), 'step': 3}
    """
    if not is_writer(master_only, global_master):
        sync()
        return
    module = SimpleNamespace(__name__=pickle.__name__, Pickler=_HostPickler)
    if isinstance(file_or_path, str | os.PathLike):
        with published(file_or_path) as file:
            torch.save(data, file, pickle_module=module)
    else:
        torch.save(data, file_or_path, pickle_module=module)


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same part of the same memory, as a tied weight is under its two names."""
    storage = StorageWeakRef(tensor.untyped_storage()).cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class _HostPickler(pickle.Pickler):
    """Pickles copies on the CPU for tensors that are elsewhere."""

    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._kept: list[Tensor] = []  # so that no identity is given to another tensor meanwhile

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return NotImplemented
        key = identity_of(value)
        if key not in self._copies:
            self._copies[key] = value.detach().cpu()
            self._kept.append(value)
        copy = self._copies[key]
        if isinstance(value, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, value.requires_grad)
        elif value.requires_grad and value.is_leaf:
            copy = copy.detach().requires_grad_()
        return copy.__reduce_ex__(2)
