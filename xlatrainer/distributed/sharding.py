"""How tensors are spread over a mesh: `mark_sharding` and what belongs to it.

A partition spec has an entry for each dimension of a tensor: None (each device has all of it), an axis of the mesh by
name or index, or a tuple of axes. May import mesh and `backend`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch import Tensor

from xlatrainer.backend import tensor as device_tensors
from xlatrainer.backend import transfer
from xlatrainer.backend.placement import Sharding
from xlatrainer.backend.state import state
from xlatrainer.distributed.mesh import Mesh, use_home

__all__ = [
    "PartitionSpec",
    "ShardingSpec",
    "clear_sharding",
    "get_sharding_spec",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "place",
    "place_input",
    "place_parts",
    "regathered",
    "resolve_sharding",
    "set_sharding",
    "shard_shape",
    "sharded_like",
    "sharding_of",
    "to_one_device",
]

# None, an axis, or several for one dimension
PartitionSpec = Sequence[str | int | None | Sequence[str | int]]


def _axes(mesh: Mesh, entry: Any, dimension: int) -> tuple[str, ...]:
    """The names of the axes that a dimension is split over."""
    if entry is None:
        return ()
    names = []
    for axis in entry if isinstance(entry, tuple | list) else (entry,):
        if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < len(mesh.axis_names):
            names.append(mesh.axis_names[axis])
        elif isinstance(axis, str) and axis in mesh.axis_names:
            names.append(axis)
        else:
            raise ValueError(
                f"partition_spec names the axis {axis!r} for dimension {dimension}; the mesh has {dict(mesh.shape())}, "
                f"by name or by index from 0"
            )
    return tuple(names)


def resolve_sharding(shape: Sequence[int], mesh: Mesh, partition_spec: PartitionSpec) -> Sharding:
    """The sharding of a tensor of `shape`.

    Raises:
        ValueError: If the spec does not fit: its length, an axis that is unknown or used twice, a dimension that its
            axes do not divide.
    """
    spec = tuple(partition_spec)
    if len(spec) != len(shape):
        raise ValueError(
            f"partition_spec {spec} has {len(spec)} entries, and the tensor's shape {tuple(shape)} has {len(shape)} "
            f"dimensions: give one entry each, None for a dimension that is not split"
        )
    used: dict[str, int] = {}
    entries: list[Any] = []
    for dimension, (size, entry) in enumerate(zip(shape, spec, strict=True)):
        axes = _axes(mesh, entry, dimension)
        parts = 1
        for axis in axes:
            if axis in used:
                raise ValueError(
                    f"partition_spec {spec} uses the axis {axis!r} for the dimensions {used[axis]} and {dimension}: an "
                    f"axis can split one of them"
                )
            used[axis] = dimension
            parts *= mesh.shape()[axis]
        if size % parts:
            raise ValueError(
                f"dimension {dimension} of shape {tuple(shape)} cannot be split into {parts} equal parts over "
                f"{axes}; pad it to {size + parts - size % parts}, or leave it whole (None)"
            )
        entries.append(axes[0] if len(axes) == 1 else axes or None)
    jax_spec = jax.sharding.PartitionSpec(*entries)
    return mesh.home.sharding(jax.sharding.NamedSharding(mesh.jax, jax_spec), len(shape))


def _check_device(tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or tensor.device.type != "xla":
        what = f"a tensor on {tensor.device}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise ValueError(f"only tensors on the xla device are sharded, got {what}; move it with .to('xla')")


def mark_sharding(tensor: Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> Tensor:
    """Spread a tensor over a mesh, in place; for a parameter or buffer, whatever is written to it later as well.

    Programs run on the mesh's devices from then on. An activation in the midst of a model is constrained to lie so.

    Args:
        tensor: On `xla`.
        mesh: The devices.
        partition_spec: An entry for each dimension: None, an axis (name or index), or a tuple of axes.

    Returns:
        The tensor.

    Raises:
        ValueError: If the spec does not fit the tensor or the mesh.
    """
    _check_device(tensor)
    set_sharding(tensor, resolve_sharding(tensor.shape, mesh, partition_spec))
    return tensor


def clear_sharding(tensor: Tensor) -> Tensor:
    """Let the tensor's future contents lie as XLA likes; what it holds now stays where it is."""
    _check_device(tensor)
    with state.lock:
        device_tensors.set_sharding(tensor.detach(), None)
    return tensor


class _Marked(torch.autograd.Function):
    """The tensor constrained to one sharding, its gradient to another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sharding: Sharding, of_gradient: Sharding) -> Tensor:
        ctx.of_gradient = of_gradient
        return _constrained(tensor, sharding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _constrained(gradients[0], ctx.of_gradient), None, None


def _constrained(tensor: Tensor, sharding: Sharding) -> Tensor:
    with state.lock:
        value = device_tensors.value_of(tensor)
        return device_tensors.new_tensor(device_tensors.constrained(value, sharding))


def sharded_like(tensor: Tensor, sharding: Sharding, of_gradient: Sharding) -> Tensor:
    """The same contents spread so, and what comes back as its gradient spread as `of_gradient`. Differentiable."""
    return _Marked.apply(tensor, sharding, of_gradient)


def regathered(tensor: Tensor) -> Tensor:
    """The contents of a sharded tensor, whole on each device, gathered anew whatever was gathered before."""
    sharding = sharding_of(tensor)
    with state.lock:
        value = device_tensors.value_of(tensor)
        return device_tensors.new_tensor(value if sharding is None else device_tensors.regathered(value, sharding.home))


def mark_sharding_with_gradients(tensor: Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> Tensor:
    """As `mark_sharding` for an activation, but as a new tensor, whose gradient is constrained to lie alike.

    Returns:
        A tensor with the same contents.
    """
    _check_device(tensor)
    sharding = resolve_sharding(tensor.shape, mesh, partition_spec)
    use_home(mesh.home)
    return sharded_like(tensor, sharding, sharding)


def get_sharding_spec(tensor: Tensor) -> tuple[Any, ...] | None:
    """How the tensor is spread, or will be once it is computed: an entry for each dimension, as in a partition spec.

    Returns:
        None if it is whole on each device, or if nobody knows yet.
    """
    sharding = sharding_of(tensor)
    if sharding is None or sharding.is_replicated or not isinstance(sharding.jax, jax.sharding.NamedSharding):
        return None
    spec = tuple(sharding.jax.spec)
    return spec + (None,) * (tensor.dim() - len(spec))


def place(tensor: Tensor, sharding: Sharding) -> Tensor:
    """A copy of a CPU tensor on the devices, each of which gets its part alone; what is written to it stays so."""
    use_home(sharding.home)
    with state.lock:
        made = device_tensors.new_tensor(device_tensors.from_host(tensor.detach(), sharding))
        if not sharding.is_replicated:  # what takes the place of a tensor that is whole on each device is so anyway
            device_tensors.storage_data(made).sharding = sharding
    return made


def sharding_of(tensor: Tensor) -> Sharding | None:
    """How the tensor lies on the devices, or will; None on the one device, and if nobody knows yet."""
    _check_device(tensor)
    with state.lock:
        data = device_tensors.storage_data(tensor)
        return data.sharding or (None if data.value is None else data.value.sharding)


def set_sharding(tensor: Tensor, sharding: Sharding) -> None:
    """Spread the tensor so, in place, and what is written to it later as well."""
    use_home(sharding.home)
    with state.lock:
        device_tensors.set_sharding(tensor.detach(), sharding)


def to_one_device(tensor: Tensor) -> None:
    """Bring a tensor that lies on several devices to the first one alone, in place; others stay as they are."""
    with state.lock:
        device_tensors.unspread(tensor.detach())


def shard_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the part of the tensor that a device has."""
    sharding = sharding_of(tensor)
    return tuple(tensor.shape) if sharding is None else tuple(sharding.jax.shard_shape(tuple(tensor.shape)))


@dataclass(frozen=True)
class ShardingSpec:
    """Where a loader puts a tensor of its batches: each device gets its part directly from the host.

    Programs run on the mesh's devices once it is made.

    Attributes:
        mesh: The devices.
        partition_spec: As in `mark_sharding`.
        minibatch: Whether each process has a part of the batch (of dimension 0), which together are the whole. Default
            False: each process has the whole batch.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = False

    def __post_init__(self) -> None:
        use_home(self.mesh.home)

    def can_apply(self, tensor: Tensor) -> bool:
        """Whether the tensor has as many dimensions as the spec has entries."""
        return tensor.dim() == len(tuple(self.partition_spec))

    def apply(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor on the devices.

        Raises:
            ValueError: If the spec does not fit the tensor.
        """
        if not self.minibatch or jax.process_count() == 1:
            return place_input(tensor, resolve_sharding(tensor.shape, self.mesh, self.partition_spec))
        whole = (tensor.shape[0] * jax.process_count(), *tensor.shape[1:])
        return place_parts(tensor, whole, resolve_sharding(whole, self.mesh, self.partition_spec))


def place_input(tensor: Tensor, sharding: Sharding) -> Tensor:
    """A copy of a CPU tensor on the devices, spread so; what is written to it later may lie in any way.

    From any thread; see `transfer.uploaded`.
    """
    return transfer.uploaded(tensor, sharding)


def place_parts(part: Tensor, shape: tuple[int, ...], sharding: Sharding) -> Tensor:
    """A tensor of `shape` of which each process gives its part of dimension 0, in the order of the processes.

    From any thread.
    """
    value = device_tensors.from_process(part.detach(), shape, sharding)
    with state.lock:
        return device_tensors.new_tensor(value)
