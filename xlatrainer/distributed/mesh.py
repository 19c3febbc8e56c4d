"""`Mesh`: devices in a grid with named axes, and the one that is in use.

One process drives all its devices as one torch device: tensors are sharded over a mesh, programs are compiled once for
all devices, and XLA puts in what they send to one another. May import `backend`.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xlatrainer.backend import placement, runtime
from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.placement import Home
from xlatrainer.backend.state import state

__all__ = [
    "HybridMesh",
    "Mesh",
    "get_1d_mesh",
    "get_global_mesh",
    "is_spmd",
    "set_global_mesh",
    "use_home",
    "use_spmd",
]


class Mesh:
    """Devices in a grid whose axes have names.

    Args:
        device_ids: Positions in `xlatrainer.real_devices()`, each at most once, as many as `mesh_shape` has places;
            a sequence or an array of any shape, whose order counts.
        mesh_shape: The size of each axis.
        axis_names: A name for each axis. Default None: they are then spoken of by index.

    Attributes:
        device_ids: An array, flat.
        mesh_shape, axis_names: As given; without names they are "axis0", "axis1", ...

    Raises:
        ValueError: If these do not fit together.

    Example:
        >>> dict(Mesh([0], (1, 1), ("data", "model")).shape())
        {'data': 1, 'model': 1}
    """

    def __init__(self, device_ids: Any, mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None) -> None:
        self.device_ids = np.array(device_ids, dtype=np.int64).reshape(-1)
        self.mesh_shape = tuple(int(size) for size in mesh_shape)
        if axis_names is None:
            axis_names = [f"axis{index}" for index in range(len(self.mesh_shape))]
        self.axis_names = tuple(axis_names)
        if len(self.axis_names) != len(self.mesh_shape):
            raise ValueError(f"{len(self.mesh_shape)} axes {self.mesh_shape} need as many names, got {self.axis_names}")
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"each axis needs a name of its own, got {self.axis_names}")
        if math.prod(self.mesh_shape) != self.device_ids.size:
            raise ValueError(
                f"a mesh of shape {self.mesh_shape} has {math.prod(self.mesh_shape)} places, and "
                f"{self.device_ids.size} device ids were given"
            )
        if len(set(self.device_ids.tolist())) != self.device_ids.size:
            raise ValueError(f"a device can be in a mesh once only, got {self.device_ids.tolist()}")
        there = runtime.global_devices()
        unknown = [i for i in self.device_ids.tolist() if not 0 <= i < len(there)]
        if unknown:
            more = " (CPU_NUM_DEVICES=N makes N of the CPU)" if there[0].platform == "cpu" else ""
            raise ValueError(f"there are the devices 0 to {len(there) - 1}{more}, got {unknown}")
        devices = np.array([there[i] for i in self.device_ids], dtype=object).reshape(self.mesh_shape)
        self.jax = jax.sharding.Mesh(devices, self.axis_names)
        self._home = placement.home_of(list(devices.flat))

    @property
    def home(self) -> Home:
        """The devices, for the backend."""
        return self._home

    def size(self) -> int:
        """How many devices it has."""
        return int(self.device_ids.size)

    def shape(self) -> "OrderedDict[str, int]":
        """The size of each axis by its name."""
        return OrderedDict(zip(self.axis_names, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> np.ndarray[Any, Any]:
        """The device ids in the mesh's shape."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The index of the axis of that name; None if there is none."""
        return self.axis_names.index(name) if name in self.axis_names else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self.jax == other.jax

    def __hash__(self) -> int:
        return hash(self.jax)

    def __repr__(self) -> str:
        return f"Mesh({dict(self.shape())}, device_ids={self.device_ids.tolist()})"


class HybridMesh(Mesh):
    """A mesh over several hosts whose outer axes are those between hosts, so that neighbours talk over the fast links.

    Args:
        ici_mesh_shape: The size of each axis within a host, or a slice of TPUs.
        dcn_mesh_shape: The size of each axis between hosts; the mesh has the products of both. Default None: all 1.
        axis_names: A name for each axis; default None.
    """

    def __init__(
        self,
        *,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        dcn = tuple(dcn_mesh_shape) if dcn_mesh_shape is not None else (1,) * len(ici_mesh_shape)
        if len(dcn) != len(ici_mesh_shape):
            raise ValueError(f"ici_mesh_shape {tuple(ici_mesh_shape)} and dcn_mesh_shape {dcn} need as many axes")
        devices = runtime.global_devices()
        hosts = sorted({device.process_index for device in devices})
        if math.prod(dcn) != len(hosts) or math.prod(ici_mesh_shape) * len(hosts) != len(devices):
            raise ValueError(
                f"there are {len(hosts)} host(s) with {len(devices) // len(hosts)} device(s) each: dcn_mesh_shape "
                f"{dcn} must have {len(hosts)} places and ici_mesh_shape {tuple(ici_mesh_shape)} those of a host"
            )
        own = [[i for i, device in enumerate(devices) if device.process_index == host] for host in hosts]
        grid = np.array(own).reshape(*dcn, *ici_mesh_shape)
        rank = len(dcn)
        grid = grid.transpose([axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair])
        shape = [outer * inner for outer, inner in zip(dcn, ici_mesh_shape, strict=True)]
        super().__init__(grid.reshape(shape), shape, axis_names)
        self.ici_mesh_shape, self.dcn_mesh_shape = tuple(ici_mesh_shape), dcn


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """A mesh of all devices in a row, those of other processes included."""
    number = len(runtime.global_devices())
    return Mesh(range(number), (number,), None if axis_name is None else (axis_name,))


class _Global:
    mesh: Mesh | None = None


def set_global_mesh(mesh: Mesh) -> None:
    """Make `mesh` the one that `get_global_mesh` gives, and run programs on its devices from now on."""
    use_home(mesh.home)
    _Global.mesh = mesh


def get_global_mesh() -> Mesh | None:
    """What was given to `set_global_mesh`; None before."""
    return _Global.mesh


def use_spmd() -> None:
    """Run programs on all devices from now on: what is not sharded is whole on each of them.

    Tensors that are there already are brought along when they are used next.
    """
    use_home(get_1d_mesh().home)


def is_spmd() -> bool:
    """Whether programs run on the devices of a mesh."""
    return state.home is not None


def use_home(home: Home | None) -> None:
    """Run programs on these devices from now on; None: on the first device alone."""
    with state.lock:
        if state.home is not home:
            run_pending("programs run on other devices from now on")
            state.set_home(home)
