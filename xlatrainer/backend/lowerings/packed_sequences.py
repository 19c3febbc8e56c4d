"""Sequences of different lengths without gaps, and as a padded batch.

Packed, the first rows of all sequences come first, then all second rows, and so on; sequences are sorted by length, the
longest first. `batch_sizes` says how many of them reach each step. It is data, so that a program serves all lengths.

Shapes: padded (T, B, ...), packed (N, ...), batch_sizes (T). T: steps of the longest sequence, B: sequences, N: rows.

May import: registry.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.lowerings.registry import lowering

__all__ = ["Places", "places"]


class Places(NamedTuple):
    """Where the rows of packed sequences are in a padded batch, and back."""

    rows: Any  # (T, B)
    active: Any  # (T, B): there is such a row
    in_batch: Any  # (N), of T * B

    def padded(self, packed: Any) -> Any:
        """(T, B, ...) of (N, ...); where there is no row any other one."""
        return jnp.take(packed, self.rows, axis=0, mode="clip")

    def packed(self, padded: Any) -> Any:
        """(N, ...) of (T, B, ...), or of more steps."""
        return jnp.take(padded.reshape(-1, *padded.shape[2:]), self.in_batch, axis=0, mode="clip")


def places(batch_sizes: Any, batch: int, count: int) -> Places:
    """The places of `count` rows of `batch` sequences."""
    starts = jnp.cumsum(batch_sizes) - batch_sizes
    row = jnp.arange(batch)
    step = jnp.repeat(jnp.arange(batch_sizes.shape[0]), batch_sizes, total_repeat_length=count)
    in_batch = step * batch + jnp.arange(count) - starts[step]
    return Places(starts[:, None] + row, row < batch_sizes[:, None], in_batch)


@lowering("xlatrainer::packed_rows")
def packed_rows(padded, batch_sizes, count):
    return places(batch_sizes, padded.shape[1], count).packed(padded)


@lowering("xlatrainer::padded_rows")
def padded_rows(packed, batch_sizes, batch, steps, value):
    """What is behind the end of a sequence is `value`."""
    found = places(batch_sizes, batch, packed.shape[0])
    active = lax.expand_dims(found.active, range(2, packed.ndim + 1))
    padding = jnp.asarray(value).astype(packed.dtype)
    padded = jnp.where(active, found.padded(packed), padding)
    behind = [(0, steps - batch_sizes.shape[0], 0)] + [(0, 0, 0)] * packed.ndim
    return lax.pad(padded, padding, behind)
