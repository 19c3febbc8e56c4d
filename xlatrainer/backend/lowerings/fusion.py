"""Where XLA's fusion must stop.

May import: jax.
"""

from typing import Any

from jax import lax

__all__ = ["materialized"]


def materialized(*arrays: Any) -> Any:
    """`arrays`, written to memory on the CPU instead of being computed again by each operator that reads them.

    XLA's CPU backend fuses a producer into every consumer, once for each time an element is read. For what reads an
    element many times (windows) or costs much to compute, that multiplies the work: a max pooling that fed a batch norm
    ran four times. Other platforms choose well by themselves. Gives one array for one.
    """
    result = lax.platform_dependent(*arrays, cpu=_barrier, default=_unchanged)
    return result[0] if len(arrays) == 1 else result


def _barrier(*arrays: Any) -> tuple[Any, ...]:
    return tuple(lax.optimization_barrier(arrays))


def _unchanged(*arrays: Any) -> tuple[Any, ...]:
    return arrays
