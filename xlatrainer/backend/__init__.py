"""The lazy `xla` device. Importing this package registers it with torch, once."""

from xlatrainer.backend import lowerings
from xlatrainer.backend._private_api import register_backend
from xlatrainer.backend.autocast import register_autocast
from xlatrainer.backend.device_module import make_device_module
from xlatrainer.backend.kernels import register_kernels

__all__ = ["lowerings"]

register_backend("xla", make_device_module())
register_kernels()
register_autocast()
