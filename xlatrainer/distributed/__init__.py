"""Several devices: meshes, and how tensors are spread over them."""

from xlatrainer.distributed.launch import launch
from xlatrainer.distributed.mesh import (
    HybridMesh,
    Mesh,
    get_1d_mesh,
    get_global_mesh,
    is_spmd,
    set_global_mesh,
    use_spmd,
)
from xlatrainer.distributed.sharding import (
    ShardingSpec,
    clear_sharding,
    get_sharding_spec,
    mark_sharding,
    mark_sharding_with_gradients,
)
from xlatrainer.distributed.visualize import visualize_tensor_sharding

__all__ = [
    "HybridMesh",
    "Mesh",
    "ShardingSpec",
    "clear_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "get_sharding_spec",
    "is_spmd",
    "launch",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "use_spmd",
    "visualize_tensor_sharding",
]
