"""`SpmdStrategy`: the model and the batches spread over a mesh of devices that run one program together.

What is the same for all such strategies: placing a model, sharding batches, keeping optimizer state beside its
parameters, and the account of what lies where. How a parameter is sharded is each strategy's own.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.backend import runtime
from xlatrainer.backend.placement import Home, Sharding
from xlatrainer.backend.random import get_rng_state_tensor, set_rng_state_tensor
from xlatrainer.distributed.mesh import Mesh, set_global_mesh
from xlatrainer.distributed.processes import from_first, process_count, process_index
from xlatrainer.distributed.sharding import (
    PartitionSpec,
    place,
    place_input,
    place_parts,
    resolve_sharding,
    set_sharding,
    sharding_of,
)
from xlatrainer.distributed.team import JoinedProcesses, Team
from xlatrainer.nested import map_tensors
from xlatrainer.strategies.gathering import remove_gathering
from xlatrainer.strategies.layout import describe_layout
from xlatrainer.strategies.materialization import materialize, replace_parameter
from xlatrainer.strategies.single import SingleDeviceStrategy, refuse_shared_memory, tie, tied_names

__all__ = ["SpmdStrategy", "all_devices"]


def all_devices(devices: int | Sequence[int] | None) -> list[int]:
    """The positions of devices in `xlatrainer.real_devices()` that an argument `devices` stands for.

    Args:
        devices: How many, or which; None for all there are, those of other processes included.

    Raises:
        ValueError: If there are not so many, or if it is none.
    """
    from_all = len(runtime.global_devices())
    if devices is None:
        return list(range(from_all))
    if isinstance(devices, int):
        if not 1 <= devices <= from_all:
            raise ValueError(
                f"devices={devices}, and there are {from_all}; on the CPU, CPU_NUM_DEVICES=N makes N of it in each "
                f"process"
            )
        return list(range(devices))
    if not devices:
        raise ValueError("devices is empty; name at least one, or None for all")
    return list(devices)


class SpmdStrategy(SingleDeviceStrategy):
    """Train on the devices of a mesh.

    A batch is the global one: it is split over the axes `data_axes`, the loss is the mean over all of it, a batch norm
    in train mode takes its statistics over all of it, and gradients are clipped by their global norm.

    Args:
        mesh: The devices.
        data_axes: The axes that the rows of a batch are split over; those that the mesh has not are left out.
    """

    def __init__(self, mesh: Mesh, data_axes: Sequence[str]) -> None:
        super().__init__()
        self.mesh = mesh
        self.data_axes = tuple(axis for axis in data_axes if axis in mesh.axis_names)
        self._model: nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._names: dict[Tensor, str] = {}
        self._team = JoinedProcesses() if mesh.home.spans_processes else None
        self._wishes = JoinedProcesses()  # apart from checkpoints, whose messages another thread sends

    @abstractmethod
    def spec_of(self, name: str, parameter: Tensor) -> PartitionSpec | None:
        """How a parameter is sharded; None: whole on each device."""

    def state_spec_of(self, name: str, parameter: Tensor) -> PartitionSpec | None:
        """How its optimizer state is sharded; by default like the parameter."""
        return self.spec_of(name, parameter)

    @property
    def home(self) -> Home:
        return self.mesh.home

    @property
    def team(self) -> Team | None:
        return self._team

    @property
    def batch_parts(self) -> int:
        parts = 1
        for axis in self.data_axes:
            parts *= self.mesh.shape()[axis]
        return parts

    @property
    def process(self) -> tuple[int, int]:
        return process_index(), process_count()

    def strongest(self, wish: int) -> int:
        return wish if process_count() == 1 else max(map(int, self._wishes.gather(str(wish))))

    def sharding(self, shape: Sequence[int], spec: PartitionSpec | None) -> Sharding:
        """The sharding of a tensor of `shape`."""
        return self.mesh.home.replicated if spec is None else resolve_sharding(shape, self.mesh, spec)

    def setup(self, model: nn.Module) -> nn.Module:
        self._check_specs(model)
        set_global_mesh(self.mesh)
        self._agree_on_randomness()
        remove_gathering(model)
        refuse_shared_memory(model, self.device)
        tied = tied_names(model)
        materialize(model, self._placed)
        for name, parameter in list(model.named_parameters()):
            if parameter.device.type != "xla":
                replace_parameter(model, name, self._placed(name, parameter))
            else:  # of a Trainer before this one
                self._mark(parameter, self.spec_of(name, parameter))
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "xla":
                    module._buffers[key] = place_input(buffer, self.mesh.home.replicated)
        tie(model, tied)
        self._model = model
        self.prepare(model)
        return model

    def prepare(self, model: nn.Module) -> None:
        """What else the model needs, once its parameters are in place; by default nothing."""

    def _agree_on_randomness(self) -> None:
        """Let several processes go on with the random states of the first, and see that they can share batches."""
        count = process_count()
        if count == 1:
            return
        if self.batch_parts % count:
            raise ValueError(
                f"{count} processes share each batch, so the axes {self.data_axes} of {self.mesh} must split it into a "
                f"multiple of {count} parts, not {self.batch_parts}"
            )
        torch.set_rng_state(from_first(torch.get_rng_state()))
        set_rng_state_tensor(from_first(get_rng_state_tensor()))

    def _check_specs(self, model: nn.Module) -> None:
        """Raise for a spec that does not fit its parameter, before anything is placed."""
        for name, parameter in model.named_parameters():
            for spec in (self.spec_of(name, parameter), self.state_spec_of(name, parameter)):
                try:
                    self.sharding(parameter.shape, spec)
                except ValueError as error:
                    raise ValueError(f"the parameter {name}: {error}") from error

    def _placed(self, name: str, parameter: Tensor) -> Tensor:
        parameter = from_first(parameter)  # which all processes begin with
        return place(parameter, self.sharding(parameter.shape, self.spec_of(name, parameter)))

    def _mark(self, tensor: Tensor, spec: PartitionSpec | None) -> None:
        sharding = self.sharding(tensor.shape, spec)
        if sharding_of(tensor) is not sharding:
            set_sharding(tensor, sharding)

    def place_like(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            name = self._name_of(parameter)
            if name is not None and tensor.device.type == "xla" and tensor.shape == parameter.shape:
                self._mark(tensor, self.state_spec_of(name, parameter))

    def put_beside(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        name = self._name_of(parameter)
        if name is None:  # of a loss with parameters, say
            return super().put_beside(parameter, tensor)
        return place(tensor, self.sharding(parameter.shape, self.state_spec_of(name, parameter)))

    def place_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        for parameter, state in optimizer.state.items():
            tensors = [value for value in state.values() if isinstance(value, Tensor)]
            self.place_like([parameter] * len(tensors), tensors)

    def _name_of(self, parameter: Tensor) -> str | None:
        """The name of a parameter of the model; None for one that is not the model's."""
        if self._names.get(parameter) is None:
            self._names = {parameter: name for name, parameter in self._named().items()}
        return self._names.get(parameter)

    def _named(self) -> dict[str, nn.Parameter]:
        assert self._model is not None, "setup comes first"
        return dict(self._model.named_parameters())

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        set_global_mesh(self.mesh)
        with super().loop():
            yield

    def to_device(self, batch: Any) -> Any:
        return map_tensors(self._sharded, batch)

    def _sharded(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "xla":
            return tensor
        if process_count() > 1:
            return self._of_all_processes(tensor)
        is_split = tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % self.batch_parts == 0
        spec = (self.data_axes, *[None] * (tensor.dim() - 1)) if is_split and self.data_axes else None
        return place_input(tensor, self.sharding(tensor.shape, spec))

    def _of_all_processes(self, tensor: Tensor) -> Tensor:
        """The rows of all processes, of which this one's are given; of a tensor without rows the processes' own."""
        if tensor.dim() == 0:
            return place_input(tensor, self.mesh.home.replicated)
        shape = (tensor.shape[0] * process_count(), *tensor.shape[1:])
        return place_parts(tensor, shape, self.sharding(shape, (self.data_axes, *[None] * (tensor.dim() - 1))))

    def describe(self) -> str:
        title = f"{type(self).__name__} on {self.mesh}"
        return describe_layout(title, self._named(), self._optimizers, self.mesh.size())
