"""What a lowering does on one platform only.

May import: jax.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax

__all__ = ["lowered_for", "lowering_as_elsewhere", "on_cpu_or_else"]

_as_elsewhere = ContextVar("_as_elsewhere", default=False)


@contextlib.contextmanager
def lowering_as_elsewhere() -> Iterator[None]:
    """A block in which operators are lowered to what other platforms than the CPU get."""
    token = _as_elsewhere.set(True)
    try:
        yield
    finally:
        _as_elsewhere.reset(token)


def lowered_for() -> str | None:
    """The platform of `jax.default_device`, for which programs are lowered; None where no device is set."""
    if _as_elsewhere.get():
        return "elsewhere"
    device = getattr(jax.config, "jax_default_device", None)  # which jax's own annotations leave out
    return device.platform if isinstance(device, jax.Device) else None


def on_cpu_or_else(cpu: Callable[..., Any], default: Callable[..., Any], *arrays: Any) -> Any:
    """`cpu(*arrays)` in programs for the CPU, `default(*arrays)` in those for other platforms.

    Where no platform is known, as when only shapes are asked for, JAX keeps both until it is: a hundred of those take
    it half of the time of a lowering.
    """
    platform = lowered_for()
    if platform is None:
        return lax.platform_dependent(*arrays, cpu=cpu, default=default)
    return cpu(*arrays) if platform == "cpu" else default(*arrays)
