"""The lazy `xla` device. Importing this package registers it and `torch.compile`'s backend with torch, once."""

from xlatrainer.backend import lowerings
from xlatrainer.backend._private_api import register_backend, register_compiler
from xlatrainer.backend.autocast import register_autocast
from xlatrainer.backend.device_module import make_device_module
from xlatrainer.backend.kernels import register_kernels
from xlatrainer.backend.modes import begin_as_set

__all__ = ["lowerings"]

register_backend("xla", make_device_module())
register_kernels()
register_autocast()
begin_as_set()
register_compiler("xlatrainer.backend.dynamo", "openxla")
