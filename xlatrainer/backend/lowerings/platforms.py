"""What a lowering does on one platform only.

May import: jax.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

__all__ = ["lowered_for", "on_cpu_or_else"]


def lowered_for() -> str | None:
    """The platform of `jax.default_device`, for which programs are lowered; None where no device is set."""
    device = getattr(jax.config, "jax_default_device", None)  # which jax's own annotations leave out
    return device.platform if isinstance(device, jax.Device) else None


def on_cpu_or_else(cpu: Callable[..., Any], default: Callable[..., Any], *arrays: Any) -> Any:
    """`cpu(*arrays)` in programs for the CPU, `default(*arrays)` in those for other platforms.

    Where no platform is known, as when only shapes are asked for, JAX keeps both until it is: a hundred of those take
    half of the time of a lowering.
    """
    platform = lowered_for()
    if platform is None:
        return lax.platform_dependent(*arrays, cpu=cpu, default=default)
    return cpu(*arrays) if platform == "cpu" else default(*arrays)
