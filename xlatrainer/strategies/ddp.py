"""`DDPStrategy`: each device has the whole model and a part of each batch."""

from collections.abc import Sequence

from torch import Tensor

from xlatrainer.distributed.mesh import Mesh
from xlatrainer.distributed.sharding import PartitionSpec
from xlatrainer.strategies.spmd import SpmdStrategy, all_devices

__all__ = ["DDPStrategy"]


class DDPStrategy(SpmdStrategy):
    """Data parallel: parameters are replicated, batches split, gradients summed over all devices.

    Args:
        devices: How many devices, or which, by their positions in `xlatrainer.real_devices()`. Default None, all.
    """

    def __init__(self, devices: int | Sequence[int] | None = None) -> None:
        chosen = all_devices(devices)
        super().__init__(Mesh(chosen, (len(chosen),), ("data",)), ("data",))

    def spec_of(self, name: str, parameter: Tensor) -> PartitionSpec | None:
        return None
