"""Where XLA's fusion must stop.

May import: platforms, jax.
"""

from typing import Any

from jax import lax

from xlatrainer.backend.lowerings.platforms import on_cpu_or_else

__all__ = ["channels_moved", "materialized", "materialized_images"]


def materialized(*arrays: Any) -> Any:
    """`arrays`, written to memory on the CPU instead of being computed again by each operator that reads them.

    XLA's CPU backend fuses a producer into every consumer, once for each time an element is read. For what reads an
    element many times (windows) or costs much to compute, that multiplies the work: a max pooling that fed a batch norm
    ran four times. Other platforms choose well by themselves. Gives one array for one.
    """
    result = on_cpu_or_else(_barrier, _unchanged, *arrays)
    return result[0] if len(arrays) == 1 else result


FEW_CHANNELS = 16  # fewer do not fill a vector register


def materialized_images(array: Any, channels: int = 1) -> Any:
    """`materialized`, with many channels (dim `channels`) innermost, as convolutions have them on the CPU.

    Behind the barrier as a matrix, since XLA would choose the order of more dims itself and transpose in between.
    """
    if not 0 <= channels < array.ndim or array.shape[channels] < FEW_CHANNELS:
        return materialized(array)
    inner = channels_moved(array, channels, array.ndim - 1)
    matrix = materialized(inner.reshape(-1, array.shape[channels]))
    return channels_moved(matrix.reshape(inner.shape), array.ndim - 1, channels)


def channels_moved(array: Any, dim: int, to: int) -> Any:
    """`array` with its dim `dim` as dim `to`; the others stay in order."""
    order = [other for other in range(array.ndim) if other != dim]
    return lax.transpose(array, [*order[:to], dim, *order[to:]])


def _barrier(*arrays: Any) -> tuple[Any, ...]:
    return tuple(lax.optimization_barrier(arrays))


def _unchanged(*arrays: Any) -> tuple[Any, ...]:
    return arrays
