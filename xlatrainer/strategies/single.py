"""`SingleDeviceStrategy`: the whole model and every batch on one device.

Owns the move of a model to a device with its tied weights kept tied. May import `backend`.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import xlatrainer.backend.closures as closures
import xlatrainer.backend.device as xla_device
import xlatrainer.backend.memory as memory
import xlatrainer.backend.runtime as runtime
import xlatrainer.backend.transfer as transfer
from xlatrainer.backend.placement import Home
from xlatrainer.backend.replay.step import ReplayedStep
from xlatrainer.distributed.mesh import use_home
from xlatrainer.distributed.sharding import to_one_device
from xlatrainer.nested import map_tensors
from xlatrainer.strategies.gathering import remove_gathering
from xlatrainer.strategies.strategy import Step, Strategy

__all__ = ["SingleDeviceStrategy", "refuse_shared_memory", "tie", "tied_names"]


class SingleDeviceStrategy(Strategy):
    """Train on one device.

    Args:
        device: The device; default None, which means the `xla` device of this process. `torch.device("cpu")` runs the
            same Trainer through eager PyTorch, to compare or to debug.

    Example:
        >>> SingleDeviceStrategy("cpu").device
        device(type='cpu')
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = xla_device.device() if device is None else torch.device(device)
        self._is_lazy = self._device.type == "xla"

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def home(self) -> Home | None:
        """The devices that steps run on; None: the one device."""
        return None

    def setup(self, model: nn.Module) -> nn.Module:
        if self._is_lazy:
            use_home(self.home)
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.device.type == "xla":
                    to_one_device(tensor)
        remove_gathering(model)
        refuse_shared_memory(model, self._device)
        tied = tied_names(model)
        _move(model, self._device)
        tie(model, tied)
        return model

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        if self._is_lazy:
            use_home(self.home)
        with runtime.undisturbed() if self._is_lazy else contextlib.nullcontext(), closures.finished():
            yield

    def to_device(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self._device), batch)

    def end_step(self) -> None:
        if self._is_lazy:
            xla_device.sync()

    def compiled(self, function: Callable[..., Any], state: dict[str, Any], name: str) -> Step:
        return ReplayedStep(function, state, name) if self._is_lazy else super().compiled(function, state, name)

    def memory_limit(self) -> int | None:
        return memory.memory_limit() if self._is_lazy else None

    def is_ready(self, tensor: Tensor) -> bool:
        return transfer.is_ready(tensor) if tensor.device.type == "xla" else True

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._is_lazy:
            return transfer.fetch(tensors)
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def hold(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        return transfer.hold(tensors)


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each Parameter that has more than one."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, tied: list[list[str]]) -> None:
    """Make the parameters of each group of names the first one again."""
    for first, *others in tied:
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


def _move(model: nn.Module, device: torch.device) -> None:
    """`model.to(device)`, with the same Parameter objects afterwards, so that whoever holds them goes on holding them.

    By default PyTorch replaces the Parameters of a model that moves to a device like `xla`, each occurrence of a tied
    one by another. Swapping their contents instead fails for a Parameter with weak references, or in a graph that still
    waits for its backward pass; such a model gets new Parameters.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        torch.__future__.set_swap_module_params_on_conversion(True)
        model.to(device)
    except RuntimeError:
        torch.__future__.set_swap_module_params_on_conversion(False)
        model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def refuse_shared_memory(model: nn.Module, device: torch.device) -> None:
    """Raise for two Parameters over one memory: PyTorch copies each, so that moving them would untie them unseen."""
    owner: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.device == device or parameter.device.type != "cpu" or parameter.numel() == 0:
            continue
        first = owner.setdefault(parameter.untyped_storage().data_ptr(), name)
        if first != name:
            raise ValueError(
                f"the parameters {first} and {name} share their memory but are two Parameters: on {device} each would "
                f"get a copy of its own. Assign the Parameter itself to tie weights (`b.weight = a.weight`)."
            )
