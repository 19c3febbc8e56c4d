"""The file a Trainer's state is saved in: what is in it, how it is written, and how it is read.

A dict of plain data and CPU tensors in PyTorch's own format, so that `torch.load(path, weights_only=True)` reads it
anywhere, without xlatrainer, and without executing code.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.strategies.nested import map_tensors, tensors_in
from xlatrainer.strategies.strategy import Strategy

__all__ = ["FORMAT", "collect_state", "read_checkpoint", "restore_state", "write_checkpoint"]

FORMAT = 1


def collect_state(model: nn.Module, optimizer: Optimizer, counters: Mapping[str, int], strategy: Strategy) -> Any:
    """The state as one dict, every tensor fetched to the CPU together; tied weights are there once.

    Raises:
        TypeError: If the model's or optimizer's state holds something that only executing code could read back.
    """
    model_state = model.state_dict(keep_vars=True)  # an OrderedDict that carries the modules' version numbers
    optimizer_state = optimizer.state_dict()
    _refuse_code(model_state, "model")
    _refuse_code(optimizer_state, "optimizer")
    unique = {id(tensor): tensor for tensor in tensors_in([model_state, optimizer_state])}
    on_cpu = dict(zip(unique, strategy.fetch(list(unique.values())), strict=True))
    for name, value in model_state.items():
        model_state[name] = map_tensors(lambda tensor: on_cpu[id(tensor)], value)
    return {
        "format": FORMAT,
        "model": model_state,
        "optimizer": map_tensors(lambda tensor: on_cpu[id(tensor)], optimizer_state),
        "optimizer_class": type(optimizer).__name__,
        "counters": dict(counters),
    }


def restore_state(state: Any, model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Put a state of `collect_state` into `model` and `optimizer`, and return its counters.

    Raises:
        ValueError: If it was saved with another optimizer class.
        RuntimeError: If it does not fit the model; PyTorch's message lists the names.
    """
    if state["optimizer_class"] != type(optimizer).__name__:
        raise ValueError(
            f"the checkpoint was saved with the optimizer {state['optimizer_class']}, this Trainer has "
            f"{type(optimizer).__name__}; create the Trainer with the same one"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return dict(state["counters"])


def write_checkpoint(state: Any, path: str | os.PathLike[str]) -> None:
    """Write `state` to `path`: whole or not at all, even if the process is killed meanwhile.

    It is written to another name in the same folder, flushed to the disk, and renamed; until then an older file at
    `path` stays as it was.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path: str | os.PathLike[str]) -> Any:
    """The state in the file at `path`, on the CPU. Executes no code, whatever the file holds.

    Raises:
        ValueError: If the file is no checkpoint of a Trainer, or one of a later format.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError(f"{os.fspath(path)} was not written by Trainer.save; model.load_state_dict reads bare weights")
    if state["format"] != FORMAT:
        raise ValueError(
            f"{os.fspath(path)} has format {state['format']}, this xlatrainer reads format {FORMAT}; "
            f"use the xlatrainer that wrote it"
        )
    return state


def _refuse_code(tree: Any, where: str) -> None:
    """Raise if `tree` holds anything but tensors and plain data: it would be pickled as code, and refused on load."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            _refuse_code(value, f"{where}[{key!r}]")
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            _refuse_code(value, f"{where}[{index}]")
    elif not isinstance(tree, Tensor) and type(tree) not in _PLAIN:
        raise TypeError(
            f"{where} is a {type(tree).__name__}, which cannot be saved: loading it would execute code. "
            f"Accepted: tensors, numbers, strings, None, torch dtypes, and lists, tuples and dicts of them"
        )


_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype)
