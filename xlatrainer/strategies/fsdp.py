"""`FSDPStrategy`: parameters, gradients and optimizer state sharded over the devices that share the batches."""

from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn

from xlatrainer.backend.placement import Sharding
from xlatrainer.distributed.mesh import Mesh
from xlatrainer.distributed.sharding import PartitionSpec
from xlatrainer.strategies.gathering import gather_in_forward
from xlatrainer.strategies.spmd import SpmdStrategy, all_devices

__all__ = ["FSDPStrategy", "HSDPStrategy", "WrapPolicy", "module_wrap_policy", "size_based_wrap_policy"]

# The module that a parameter belongs to, the parameter's own name in it and the parameter, to the dimension that is
# split; None: it stays whole. "largest" leaves the choice to the strategy.
WrapPolicy = Callable[[nn.Module, str, Tensor], "int | str | None"]
LARGEST = "largest"


def size_based_wrap_policy(min_num_params: int = 0) -> WrapPolicy:
    """Shard the matrices of at least `min_num_params` elements; what has one dimension stays whole.

    The default policy, with 0: norms and biases are little, and their gradients are sums that each device has anyway.
    """

    def policy(module: nn.Module, name: str, parameter: Tensor) -> str | None:
        return LARGEST if parameter.dim() > 1 and parameter.numel() >= min_num_params else None

    return policy


def module_wrap_policy(module_classes: Collection[type[nn.Module]]) -> WrapPolicy:
    """Shard the matrices within modules of these classes; everything else stays whole."""
    classes = tuple(module_classes)

    def policy(module: nn.Module, name: str, parameter: Tensor) -> str | None:
        return LARGEST if parameter.dim() > 1 else None

    policy.module_classes = classes  # type: ignore[attr-defined]
    return policy


class FSDPStrategy(SpmdStrategy):
    """Fully sharded data parallel: each device keeps a part of every large parameter, whole ones exist while they run.

    Args:
        devices: How many devices, or which. Default None, all.
        zero: 3 shards parameters, gradients and optimizer state; 2 gradients and optimizer state; 1 optimizer state.
            Default 3.
        auto_wrap_policy: Which parameters are sharded, and along which dimension: a `WrapPolicy`,
            `size_based_wrap_policy(n)`, `module_wrap_policy(classes)` or the classes themselves. Default None: all with
            two dimensions or more. A parameter none of whose dimensions the devices divide stays whole.
        reshard_after_forward: With `zero=3`, whether the backward pass gathers the parameters again instead of keeping
            them. Default True.
    """

    def __init__(
        self,
        devices: int | Sequence[int] | None = None,
        *,
        zero: int = 3,
        auto_wrap_policy: WrapPolicy | Collection[type[nn.Module]] | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        chosen = all_devices(devices)
        mesh = Mesh(chosen, (len(chosen),), ("fsdp",))
        self._configure(mesh, ("fsdp",), zero, auto_wrap_policy, reshard_after_forward)

    def _configure(
        self,
        mesh: Mesh,
        data_axes: Sequence[str],
        zero: int,
        policy: WrapPolicy | Collection[type[nn.Module]] | None,
        reshards: bool,
    ) -> None:
        if zero not in (1, 2, 3):
            raise ValueError(f"zero={zero}: accepted are 1 (optimizer state), 2 (and gradients), 3 (and parameters)")
        super().__init__(mesh, data_axes)
        self.zero = zero
        self.reshard_after_forward = reshards
        if policy is None:
            policy = size_based_wrap_policy()
        self._policy: WrapPolicy = policy if callable(policy) else module_wrap_policy(policy)
        self._specs: dict[str, PartitionSpec | None] = {}

    def setup(self, model: nn.Module) -> nn.Module:
        self._specs = {name: self._chosen(model, name, parameter) for name, parameter in model.named_parameters()}
        return super().setup(model)

    def _chosen(self, model: nn.Module, name: str, parameter: Tensor) -> PartitionSpec | None:
        path, _, own_name = name.rpartition(".")
        classes = getattr(self._policy, "module_classes", None)
        if classes is not None and not any(isinstance(module, classes) for module in _ancestors(model, path)):
            return None
        dimension = self._policy(model.get_submodule(path), own_name, parameter)
        parts = self.mesh.shape()["fsdp"]
        if dimension == LARGEST:
            fitting = [i for i, size in enumerate(parameter.shape) if size and size % parts == 0]
            dimension = max(fitting, key=lambda i: parameter.shape[i], default=None)
        if dimension is None:
            return None
        if not isinstance(dimension, int) or isinstance(dimension, bool) or not 0 <= dimension < parameter.dim():
            raise ValueError(
                f"the policy gave {dimension!r} for {name} of shape {tuple(parameter.shape)}: accepted are a dimension "
                f"of it, {LARGEST!r}, and None to leave it whole"
            )
        return tuple("fsdp" if i == dimension else None for i in range(parameter.dim()))

    def spec_of(self, name: str, parameter: Tensor) -> PartitionSpec | None:
        return self._specs.get(name) if self.zero == 3 else None

    def state_spec_of(self, name: str, parameter: Tensor) -> PartitionSpec | None:
        return self._specs.get(name)

    def prepare(self, model: nn.Module) -> None:
        if self.zero == 1:
            return
        shardings = {
            id(parameter): self.sharding(parameter.shape, self._specs[name])
            for name, parameter in model.named_parameters()
            if self._specs.get(name) is not None
        }

        def of(parameter: Tensor) -> Sharding | None:
            return shardings.get(id(parameter))

        gather_in_forward(model, of, self.zero == 3 and self.reshard_after_forward)


def _ancestors(model: nn.Module, path: str) -> list[nn.Module]:
    """The model, and the modules on the way to the one at `path`, which is the last."""
    found = [model]
    for part in path.split(".") if path else []:
        found.append(getattr(found[-1], part))
    return found


class HSDPStrategy(FSDPStrategy):
    """Hybrid: parameters sharded within groups of devices, each group a replica with its part of the batch.

    Args:
        replicas: How many groups.
        devices, auto_wrap_policy, reshard_after_forward: As for `FSDPStrategy`.

    Raises:
        ValueError: If the devices cannot be split into so many groups.
    """

    def __init__(
        self,
        replicas: int = 2,
        devices: int | Sequence[int] | None = None,
        *,
        auto_wrap_policy: WrapPolicy | Collection[type[nn.Module]] | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        chosen = all_devices(devices)
        if replicas < 1 or len(chosen) % replicas:
            raise ValueError(f"{len(chosen)} devices cannot be split into {replicas} equal groups of replicas")
        mesh = Mesh(chosen, (replicas, len(chosen) // replicas), ("data", "fsdp"))
        self._configure(mesh, ("data", "fsdp"), 3, auto_wrap_policy, reshard_after_forward)
