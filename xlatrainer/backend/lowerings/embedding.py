"""Table look-ups and their gradients."""

import jax.numpy as jnp

from xlatrainer.backend.lowerings.checks import index_in_range
from xlatrainer.backend.lowerings.registry import lowering


def _check(indices, num_rows):
    message = f"index {{value}} out of range in self: the table has {num_rows} rows"
    index_in_range(indices, num_rows, IndexError, message)


@lowering("embedding")
def embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    _check(indices, weight.shape[0])
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowering("embedding_dense_backward")
def embedding_dense_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    _check(indices, num_weights)  # here too: without a reader of the forward's result, only this runs
    rows = indices.reshape(-1)
    grads = grad_output.reshape(rows.size, -1)
    half = grads.dtype in (jnp.float16, jnp.bfloat16)
    grads = grads.astype(jnp.float32) if half else grads
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, grads.dtype).at[rows].add(1)
        grads = grads / jnp.take(counts, rows)[:, None]
    if padding_idx >= 0:  # its row is sent out of bounds, where it is dropped
        rows = jnp.where(rows == padding_idx, num_weights, rows)
    table = jnp.zeros((num_weights, grads.shape[1]), grads.dtype).at[rows].add(grads, mode="drop")
    return table.reshape(num_weights, *grad_output.shape[indices.ndim :]).astype(grad_output.dtype)
