"""What a checkpoint holds of a Trainer: collecting it, and putting it back.

Owns the meaning of the saved state. How it becomes files is in `checkpoints`; when it is saved is in `saver`.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from xlatrainer.backend.transfer import hold_parts
from xlatrainer.data.random_states import random_states, restore_random_states
from xlatrainer.distributed.team import Team
from xlatrainer.encoding import TensorTable, encode
from xlatrainer.strategies.strategy import Strategy
from xlatrainer.trainer.checkpoints.files import Content, Share, read_checkpoint
from xlatrainer.trainer.ema import EMA
from xlatrainer.trainer.weights import Loaded, NameMap, load_into, model_state, renamed

if TYPE_CHECKING:
    from xlatrainer.trainer.progress import Progress
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["Saved", "as_saved", "collect", "collect_share", "load_progress", "load_state", "read"]

_COUNTERS = ("epoch", "step", "num_examples")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read.

    Attributes:
        path: Where it was.
        weights: The model's tensors by name, on the CPU, and what else its `state_dict` holds.
        tied: Further names of tied weights, each with the name in `weights`.
        state: "counters", "parts" and "classes" by the names of `Trainer.stateful_parts`, "progress", "random".
        run: The name of the training that it is of; None if it was written by format 1.
    """

    path: str
    weights: dict[str, Any]
    tied: dict[str, str]
    state: dict[str, Any]
    run: str | None

    @property
    def in_epoch(self) -> bool:
        """Whether it was saved in the middle of an epoch."""
        progress = self.state["progress"]
        return progress is not None and progress["done"] is not None

    def first_epoch(self, initial_epoch: int) -> int:
        """The epoch to go on with; raises `ValueError` if another one was asked for."""
        epoch = int(self.state["counters"]["epoch"])
        if initial_epoch not in (0, epoch):
            raise ValueError(
                f"initial_epoch={initial_epoch}, but {self.path} goes on with epoch {epoch}: leave initial_epoch out, "
                f"or load the checkpoint and fit without resume_from"
            )
        return epoch


def collect(trainer: Trainer, progress: Progress | None, run: str) -> Callable[[], Content]:
    """Keep the state of `trainer` as it is now; waits for nothing that is being computed.

    Args:
        trainer: Between two steps.
        progress: Where it is in its `fit`; None outside of one.
        run: The name of the training.

    Returns:
        A function that gives the state on the CPU; it waits, and may be called once, from any thread.

    Raises:
        TypeError: If a state holds something that only executing code could read back.
    """
    table = TensorTable()
    weights, tied, others = model_state(trainer.model)
    state = _shared_state(trainer, others, table)
    state["progress"] = encode(None if progress is None else progress.state_dict(), table, "progress")
    state["random"] = encode(random_states(), table, "random")
    about = _about(trainer, progress, run)
    fetch = trainer.strategy.hold([*weights.values(), *table.tensors])

    def content() -> Content:
        tensors = fetch()
        named = dict(zip(weights, tensors, strict=False))
        about["finite"] = all(_is_finite(tensor) for tensor in named.values())
        return Content(named, tied, state, tensors[len(named) :], about)

    return content


def collect_share(trainer: Trainer, progress: Progress | None, run: str, team: Team) -> Callable[[], Share]:
    """As `collect`, what this one of several processes has to save: nothing is gathered.

    Args:
        trainer, progress, run: As for `collect`.
        team: The processes.
    """
    table = TensorTable()
    weights, tied, others = model_state(trainer.model)
    state = _shared_state(trainer, others, table)
    place = None if progress is None else {**progress.state_dict()}
    state["values"] = encode(None if place is None else place.pop("values"), table, "values")
    own = TensorTable(first=len(table.tensors))
    local = {"progress": encode(place, own, "progress"), "random": encode(random_states(), own, "random")}
    about = _about(trainer, progress, run)
    held = hold_parts([*weights.values(), *table.tensors], team.owns, is_first=team.index == 0)
    fetch = trainer.strategy.hold(own.tensors)

    def share() -> Share:
        parts = held()
        named = dict(zip(weights, parts, strict=False))
        is_finite = all(_is_finite(part.tensor) for found in named.values() for part in found)
        return Share(named, tied, state, parts[len(named) :], about, local, fetch(), is_finite)

    return share


def _shared_state(trainer: Trainer, others: Mapping[str, Any], table: TensorTable) -> dict[str, Any]:
    """What all processes of a training have alike."""
    parts = trainer.stateful_parts()
    return {
        "counters": {name: getattr(trainer, name) for name in _COUNTERS},
        "classes": {name: type(part).__name__ for name, part in parts.items()},
        "parts": {name: encode(part.state_dict(), table, name) for name, part in parts.items()},
        "model": encode(others, table, "model"),
    }


def _about(trainer: Trainer, progress: Progress | None, run: str) -> dict[str, Any]:
    in_epoch = progress is not None and progress.done is not None
    counters = {name: getattr(trainer, name) for name in _COUNTERS}
    return {**counters, "in_epoch": in_epoch, "run": run, "saved": time.time()}


def read(path: str | os.PathLike[str], team: Team | None = None) -> Saved:
    """The checkpoint at `path`: a folder, or a single file of format 1. Executes no code, whatever is in it.

    Args:
        path: Where it is.
        team: Processes that all read it. Default None: this one alone.

    Raises:
        CheckpointError: If it is damaged; the message names the file.
        FileNotFoundError: If there is none.
        ValueError: If it is a file that is no checkpoint.
    """
    if "://" not in os.fspath(path) and Path(path).is_file():
        return _read_format_1(Path(path))
    return as_saved(os.fspath(path), read_checkpoint(path, team))


def as_saved(path: str, content: Content) -> Saved:
    """What the files at `path` mean."""
    state = content.decoded()
    return Saved(path, {**content.weights, **state["model"]}, content.tied, state, content.about["run"])


def load_state(
    trainer: Trainer, saved: Saved, *, strict: bool = True, names: NameMap | None = None, everything: bool
) -> Loaded:
    """Put model, optimizers and counters of a checkpoint into `trainer`, and its other parts.

    Args:
        trainer: With the same kinds of optimizers.
        saved: The checkpoint.
        strict: Whether the model's names must be the checkpoint's.
        names: From names of the checkpoint to those of the model, see `renamed`.
        everything: Whether callbacks are meant, too, so that it is worth a warning if they are others than before.

    Raises:
        ValueError: If it was saved with another optimizer class.
        RuntimeError: If it does not fit the model.
    """
    parts = trainer.stateful_parts()
    classes = saved.state["classes"]
    _compare_optimizers({name: type(p).__name__ for name, p in parts.items() if isinstance(p, Optimizer)}, classes)
    weights = renamed(saved.weights, names)
    tied = {} if names is not None else saved.tied
    loaded = load_into(trainer.model, weights, tied, strict=strict, where=saved.path)
    for name, part in parts.items():
        if name in saved.state["parts"]:
            _load_part(trainer, part, saved.state["parts"][name])
    if everything:
        _warn_of_other_parts(parts, classes, saved.path)
    trainer.strategy.end_step()
    for name in _COUNTERS:
        setattr(trainer, name, saved.state["counters"][name])
    return loaded


def _load_part(trainer: Trainer, part: Any, state: Any) -> None:
    """`part.load_state_dict(state)`, what is kept for a parameter lying beside it, in parts if the parameter does."""
    strategy = trainer.strategy
    if isinstance(part, Optimizer):
        part.load_state_dict(_beside_parameters(part, state, strategy))
        strategy.place_optimizer(part)  # what the optimizer has converted to another dtype
    elif isinstance(part, EMA):
        part.load_state_dict(state, strategy.put_beside)
    else:
        part.load_state_dict(state)


def _beside_parameters(optimizer: Optimizer, state: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """An optimizer's state whose tensors that are like a parameter are in its place.

    The optimizer itself would copy them whole to each device.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(numbers) != len(parameters):
        return dict(state)  # of which the optimizer complains
    moved = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in moved:
            moved[number] = {
                key: strategy.put_beside(parameter, value.to(parameter.dtype)) if _is_like(value, parameter) else value
                for key, value in moved[number].items()
            }
    return {**state, "state": moved}


def _is_like(value: Any, parameter: Tensor) -> bool:
    """Whether an optimizer converts this to the parameter's dtype and device: not the count of steps, of shape ()."""
    return (
        isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape and value.is_floating_point()
    )


def load_progress(saved: Saved, progress: Progress) -> None:
    """Set the place in the data, the values of the epoch so far, and all random states."""
    state = saved.state
    if state["progress"] is not None:
        progress.load_state_dict(state["progress"])
    elif state["random"] is not None:
        restore_random_states(state["random"])
    else:
        warnings.warn(
            f"{saved.path} has format 1, without random states: the order of the examples and dropout are not repeated",
            stacklevel=2,
        )


def _read_format_1(path: Path) -> Saved:
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError(f"{path} was not written by Trainer.save; Trainer.load_weights reads bare weights")
    if state["format"] != 1:
        raise ValueError(f"{path} has format {state['format']}, which no xlatrainer wrote into a single file")
    found = {
        "counters": state["counters"],
        "classes": {"optimizer": state["optimizer_class"]},
        "parts": {"optimizer": state["optimizer"]},
        "progress": None,
        "random": None,
    }
    return Saved(os.fspath(path), dict(state["model"]), {}, found, None)


def _compare_optimizers(own: Mapping[str, str], saved: Mapping[str, str]) -> None:
    for name, kind in own.items():
        if name not in saved:
            there = sorted(other for other in saved if other.startswith("optimizer")) or "none"
            raise ValueError(f"the checkpoint has no state for {name}; the optimizers in it are: {there}")
        if saved[name] != kind:
            raise ValueError(
                f"the checkpoint was saved with the optimizer {saved[name]}, this Trainer has {kind}; create the "
                f"Trainer with the same one, or load its weights alone with load_weights"
            )


def _warn_of_other_parts(parts: Mapping[str, Any], saved: Mapping[str, str], path: str) -> None:
    new, gone = sorted(parts.keys() - saved.keys()), sorted(saved.keys() - parts.keys())
    if new:
        warnings.warn(f"{path} has no state for {', '.join(new)}, which start anew", stacklevel=2)
    if gone:
        warnings.warn(f"{path} has states that nobody takes: {', '.join(gone)}. Pass the same arguments", stacklevel=2)


def _is_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all())
