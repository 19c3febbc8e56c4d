"""Table look-ups and their gradients."""

import jax.numpy as jnp

from xlatrainer.backend.lowerings.checks import holds, index_in_range
from xlatrainer.backend.lowerings.normalization import shortened
from xlatrainer.backend.lowerings.partitioning import partitioned
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

    def summed(rows, grads):
        return jnp.zeros((num_weights, grads.shape[1]), grads.dtype).at[rows].add(grads, mode="drop")

    table = partitioned(summed, "n,nw->vw", "nvw", rows, grads)
    return table.reshape(num_weights, *grad_output.shape[indices.ndim :]).astype(grad_output.dtype)


@lowering("embedding_renorm", static=("norm_type",))
def embedding_renorm(self, indices, max_norm, norm_type):
    """Rows that `indices` names are shortened; of equal indices each writes the same."""
    rows = indices.reshape(-1)
    return self.at[rows].set(shortened(jnp.take(self, rows, axis=0, mode="clip"), norm_type, 0, max_norm), mode="drop")


# bags: row b of the result is the sum, mean or maximum of the rows that `indices[offsets[b]:offsets[b + 1]]` names

_SUM, _MEAN, _MAX = 0, 1, 2


def _wide(array):
    return array.astype(jnp.float32) if array.dtype in (jnp.float16, jnp.bfloat16) else array


@lowering("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=_SUM,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    """Also gives the bag of each index, the number of indices that count in each bag, and the rows of the maxima."""
    bags = offsets.size - include_last_offset
    message = f"Index of input takes value {{value}} which is not in the valid range [0, {weight.shape[0]})"
    index_in_range(indices, weight.shape[0], RuntimeError, message)
    if offsets.size:
        message = "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0"
        holds(offsets[0] == 0, RuntimeError, message)
        holds(offsets[-1] <= indices.size, RuntimeError, f"offsets[-1] can not be greater than {indices.size}")
    offset2bag = jnp.searchsorted(offsets[:bags], jnp.arange(indices.size), side="right") - 1
    rows = _wide(jnp.take(weight, indices, axis=0, mode="clip"))
    counted = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, jnp.bool_)
    kept = jnp.where(counted, offset2bag, bags)  # what does not count is sent out of bounds, where it is dropped
    bag_size = jnp.zeros(offsets.size, indices.dtype).at[kept].add(counted.astype(indices.dtype), mode="drop")
    sizes = bag_size[:bags, None]
    max_indices = jnp.zeros(0, indices.dtype)
    if mode == _MAX:
        out = jnp.full((bags, rows.shape[1]), -jnp.inf, rows.dtype).at[kept].max(rows, mode="drop")
        max_indices = _rows_of_maxima(out, rows, indices, kept)
        out = jnp.where(sizes > 0, out, 0)
    else:
        scaled = rows if per_sample_weights is None else rows * _wide(per_sample_weights)[:, None]
        out = jnp.zeros((bags, rows.shape[1]), rows.dtype).at[kept].add(scaled, mode="drop")
        out = out / jnp.maximum(sizes, 1).astype(out.dtype) if mode == _MEAN else out
    return out.astype(weight.dtype), offset2bag.astype(indices.dtype), bag_size, max_indices


def _rows_of_maxima(out, rows, indices, bags):
    """For each maximum the first row that has it, -1 in empty bags."""
    places = jnp.arange(indices.size)[:, None]
    found = jnp.where(rows == jnp.take(out, bags, axis=0, mode="clip"), places, indices.size)
    first = jnp.full(out.shape, indices.size).at[bags].min(found, mode="drop")
    return jnp.take(indices, first, mode="fill", fill_value=-1).astype(indices.dtype)


@lowering("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx=-1,
):
    wide = _wide(grad)
    table = jnp.zeros((num_weights, grad.shape[1]), wide.dtype)
    if mode == _MAX:
        rows = jnp.where(maximum_indices < 0, num_weights, maximum_indices)
        return table.at[rows, jnp.arange(grad.shape[1])].add(wide, mode="drop").astype(grad.dtype)
    grads = jnp.take(wide, offset2bag, axis=0, mode="clip")
    if mode == _MEAN:
        grads = grads / jnp.maximum(jnp.take(bag_size, offset2bag, mode="clip"), 1).astype(wide.dtype)[:, None]
    if per_sample_weights is not None:
        grads = grads * _wide(per_sample_weights)[:, None]
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, wide.dtype).at[indices].add(1)
        grads = grads / jnp.take(counts, indices)[:, None]
    rows = jnp.where(indices == padding_idx, num_weights, indices) if padding_idx >= 0 else indices
    return table.at[rows].add(grads, mode="drop").astype(grad.dtype)


def _dense(*args, **kwargs):
    """The tenth argument is `sparse`: the device has no sparse tensors."""
    return not kwargs.get("sparse", args[9] if len(args) > 9 else False)


@lowering("_embedding_bag_backward", supports=_dense)
def embedding_bag_backward(
    grad,
    indices,
    offsets,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    padding_idx=-1,
):
    return embedding_bag_dense_backward(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lowering("_embedding_bag_per_sample_weights_backward")
def embedding_bag_per_sample_weights_backward(grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    rows, grads = jnp.take(weight, indices, axis=0, mode="clip"), jnp.take(grad, offset2bag, axis=0, mode="clip")
    products = jnp.sum(_wide(rows) * _wide(grads), 1)
    return (
        jnp.where(indices == padding_idx, 0, products).astype(grad.dtype)
        if padding_idx >= 0
        else products.astype(grad.dtype)
    )
