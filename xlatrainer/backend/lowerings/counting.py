"""What returns as many elements as data says: found at full length, with the number of those that count.

Plain functions, not lowerings: torch's operators have no fixed shape for their results. `counted_kernels` runs these,
reads the number and cuts the results to it, so the data itself stays on the device.
"""

import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.lowerings.comparison import sorted_with_indices

__all__ = ["places", "runs", "runs_of_rows", "unique", "unique_rows"]


def places(array, size=None, fill_value=0):
    """The indices of the elements that are not 0, in row-major order, and how many there are.

    Returns:
        int64 of shape `[size, ndim]`, rows behind the last filled up; int64 scalar.
    """
    flat = array.reshape(-1) != 0
    size = flat.size if size is None else size
    after = jnp.cumsum(flat.astype(jnp.int64))
    count = after[-1] if flat.size else jnp.zeros((), jnp.int64)
    if not array.ndim:
        return jnp.zeros((size, 0), jnp.int64), count
    target = jnp.where(flat, after - 1, size)
    steps = jnp.arange(flat.size, dtype=jnp.int64)
    found = jnp.zeros(size, jnp.int64).at[target].set(steps, mode="drop")
    columns = jnp.unravel_index(found, array.shape) if flat.size else [found] * array.ndim
    filled = jnp.arange(size) < count
    return jnp.stack([jnp.where(filled, column, fill_value) for column in columns], -1), count


def _grouped(begins):
    """Where runs begin, the run of each element, the lengths of runs, and their number; `begins` is a mask."""
    length = begins.shape[0]
    starts, count = places(begins, fill_value=length)
    starts = starts[:, 0]
    group = jnp.cumsum(begins.astype(jnp.int64)) - 1
    ends = jnp.concatenate([starts[1:], jnp.full((min(length, 1),), length, jnp.int64)])
    return starts, group, ends - starts, count


def runs(flat):
    """Of runs of equal elements the value, for each element its run, the lengths and the number of runs.

    Every NaN is a run of its own, as in torch.
    """
    begins = jnp.concatenate([jnp.ones(min(flat.size, 1), bool), flat[1:] != flat[:-1]])
    starts, group, lengths, count = _grouped(begins)
    return flat.at[starts].get(mode="clip"), group, lengths, count


def unique(flat):
    """`runs` of the elements in ascending order; the run of each element is given in the order of `flat`."""
    ordered, order = sorted_with_indices(flat, 0)
    values, group, lengths, count = runs(ordered)
    return values, jnp.zeros_like(group).at[order].set(group), lengths, count


def runs_of_rows(rows):
    """`runs` of equal rows of a matrix: first the number of the row that begins a run, instead of a value."""
    begins = jnp.concatenate([jnp.ones(min(rows.shape[0], 1), bool), jnp.any(rows[1:] != rows[:-1], -1)])
    return _grouped(begins)


def unique_rows(rows):
    """`runs_of_rows` of the rows in lexicographic order: they are sorted by one column after the other, last first."""
    count, width = rows.shape

    def by_column(step, order):
        column = jnp.take(rows, width - 1 - step, axis=1)
        return order[sorted_with_indices(column[order], 0)[1]]

    order = lax.fori_loop(0, width, by_column, jnp.arange(count, dtype=jnp.int64))
    starts, group, lengths, number = runs_of_rows(rows[order])
    return order.at[starts].get(mode="clip"), jnp.zeros_like(group).at[order].set(group), lengths, number
