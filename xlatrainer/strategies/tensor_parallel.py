"""`MeshStrategy`: a mesh of one's own, and a plan of how each parameter is sharded over it."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from xlatrainer.distributed.mesh import Mesh
from xlatrainer.distributed.sharding import PartitionSpec
from xlatrainer.strategies.spmd import SpmdStrategy

__all__ = ["MeshStrategy"]


class MeshStrategy(SpmdStrategy):
    """Tensor parallelism, alone or with data parallelism.

    Args:
        mesh: The devices.
        plan: How parameters are sharded: a pattern of names to a partition spec. A pattern is a parameter's name with
            `*` for any part of it ("blocks.*.attn.qkv.weight"); or a module's, which stands for those parameters of it
            that have as many dimensions as the spec. The first that fits counts; parameters that none fits are whole.
        data_axes: The axes that batches are split over. Default ("data",), if the mesh has it.

    Raises:
        ValueError: In `setup`, for a pattern that fits no parameter, and for a spec that does not fit one.

    Example:
        >>> plan = {"*.up": ("model", None), "*.down": (None, "model")}  # nn.Linear weights are (out, in)
    """

    def __init__(self, mesh: Mesh, plan: Mapping[str, PartitionSpec], data_axes: Sequence[str] = ("data",)) -> None:
        super().__init__(mesh, data_axes)
        self.plan = dict(plan)

    def setup(self, model: nn.Module) -> nn.Module:
        named = dict(model.named_parameters())
        for pattern in self.plan:
            if not any(self._fits(pattern, name, parameter) for name, parameter in named.items()):
                raise ValueError(
                    f"the plan's {pattern!r} with a spec of {len(tuple(self.plan[pattern]))} dimensions fits no "
                    f"parameter; there are {', '.join(named)}"
                )
        return super().setup(model)

    def _fits(self, pattern: str, name: str, parameter: Tensor) -> bool:
        if fnmatchcase(name, pattern):
            return True
        return fnmatchcase(name.rpartition(".")[0], pattern) and parameter.dim() == len(tuple(self.plan[pattern]))

    def spec_of(self, name: str, parameter: Tensor) -> PartitionSpec | None:
        return next((spec for pattern, spec in self.plan.items() if self._fits(pattern, name, parameter)), None)
