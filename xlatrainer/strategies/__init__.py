"""Where parameters and batches live."""

from xlatrainer.strategies.ddp import DDPStrategy
from xlatrainer.strategies.fsdp import FSDPStrategy, HSDPStrategy, module_wrap_policy, size_based_wrap_policy
from xlatrainer.strategies.single import SingleDeviceStrategy
from xlatrainer.strategies.strategy import Strategy
from xlatrainer.strategies.tensor_parallel import MeshStrategy

__all__ = [
    "DDPStrategy",
    "FSDPStrategy",
    "HSDPStrategy",
    "MeshStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "module_wrap_policy",
    "size_based_wrap_policy",
]
