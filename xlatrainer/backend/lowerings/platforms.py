"""What a lowering does on one platform only.

May import: jax.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

__all__ = ["on_cpu_or_else"]


def on_cpu_or_else(cpu: Callable[..., Any], default: Callable[..., Any], *arrays: Any) -> Any:
    """`cpu(*arrays)` in programs for the CPU, `default(*arrays)` in those for other platforms.

    Programs are lowered for the platform of `jax.default_device`, which decides here. Where none is set, as when only
    shapes are asked for, JAX keeps both until it knows: a hundred of those take it half of the time of a lowering.
    """
    device = getattr(jax.config, "jax_default_device", None)  # which jax's own annotations leave out
    if isinstance(device, jax.Device):
        return cpu(*arrays) if device.platform == "cpu" else default(*arrays)
    return lax.platform_dependent(*arrays, cpu=cpu, default=default)
