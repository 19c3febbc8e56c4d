"""Scaled dot-product attention with its gradient, after the operator that CPU torch calls for it.

Shapes: queries (batch, heads, T, width), keys and values (batch, heads, S, width). Scores and weights are kept in
float32 for half types. Short sequences are computed at once. For long ones the matrix of weights, T x S for each head,
is never whole: rows of queries are taken a block at a time, in the gradient again, so memory grows with T + S.

Causal attention on the CPU goes by spans of queries, each with the keys up to its end: two spans leave out a quarter of
the products, four three eighths (`benchmarks/matmul.py`). Eight were slower again, and so were four of 32 queries.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.dtypes import to_numpy
from xlatrainer.backend.lowerings.fusion import materialized
from xlatrainer.backend.lowerings.linalg import dot_precision
from xlatrainer.backend.lowerings.platforms import on_cpu_or_else
from xlatrainer.backend.lowerings.registry import lowering

_AT_ONCE = 2**23  # weights of all heads that are held at once: 32 MB of float32
_LONG = 1024  # queries and keys from which on rows are taken in blocks, if there are more weights than that
_SPANS = 4  # of the queries of causal attention, at most
_SHORTEST_SPAN = 64  # queries


def _product(a, b, over):
    """Products summed over dim `over[0]` of `a` and `over[1]` of `b`, batch by batch and head by head.

    Of half types they are float32.
    """
    wide = jnp.float32 if a.dtype in (jnp.float16, jnp.bfloat16) else None
    dims = (((over[0],), (over[1],)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, precision=dot_precision(), preferred_element_type=wide)


def _scaled(query, scale):
    """The query with the scale in it, and None; a query of a half type, which that would round, and the scale."""
    if jnp.promote_types(query.dtype, jnp.float32) != query.dtype:
        return query, scale
    return materialized(query * scale.astype(query.dtype)), None


def _times(array, scale):
    return array if scale is None else array * scale.astype(array.dtype)


def _weights(query, key, mask, first, scale):
    """Weights of the keys for each query, and the logarithm of what they were divided by, (batch, heads, T, 1).

    `first` is the position of the first query if each sees the keys up to its own position only, else None. A query
    that sees no key has the weights 0.
    """
    scores = _times(_product(query, key, (3, 3)), scale)
    if first is not None:
        rows = lax.broadcasted_iota(jnp.int32, scores.shape, 2) + first
        scores = jnp.where(lax.broadcasted_iota(jnp.int32, scores.shape, 3) <= rows, scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + mask.astype(scores.dtype)
    top = jnp.max(scores, 3, keepdims=True)
    if mask is not None:
        top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, 3, keepdims=True)
    divisor = total if mask is None else jnp.where(total == 0, 1, total)
    return weights / divisor, top + jnp.log(total)


def _forward_at_once(query, key, value, mask, first, scale):
    weights, logsumexp = _weights(query, key, mask, first, scale)
    return _product(weights.astype(value.dtype), value, (3, 2)).astype(query.dtype), logsumexp[..., 0]


def _backward_at_once(grad, query, key, value, out, mask, first, scale):
    """Gradients of the queries in their dtype, of the keys and values transposed and as wide as the weights.

    The weights are computed again: XLA finds that it has them if the forward pass is in the same program. Sums over the
    queries have their smaller operand transposed, and so the result: XLA's CPU backend gives products over the rows of
    both operands to a slower library, and the threads of that one wait for other work to end.
    """
    weights, _ = _weights(query, key, mask, first, scale)
    wide = weights.dtype
    along_out = jnp.sum(grad.astype(wide) * out.astype(wide), 3, keepdims=True)
    grad_scores = _times(weights * (_product(grad, value, (3, 3)) - along_out), scale)
    narrow = grad_scores.astype(query.dtype)
    grad_query = _product(narrow, key, (3, 2)).astype(query.dtype)
    columns, grad_columns = (materialized(array.swapaxes(2, 3)) for array in (query, grad))
    return grad_query, _product(columns, narrow, (3, 2)), _product(grad_columns, weights.astype(grad.dtype), (3, 2))


# in blocks of queries


def _rows_at_once(query, key):
    """How many queries of each head make up a block, or None if all do."""
    batch, heads, rows, _ = query.shape
    columns = key.shape[2]
    if max(rows, columns) < _LONG or batch * heads * rows * columns <= _AT_ONCE:
        return None
    fitting = max(_AT_ONCE // (batch * heads * columns), 16)
    return 1 << (min(fitting, rows).bit_length() - 1)


def _in_blocks(array, size):
    """(batch, heads, T, ...) as (blocks, batch, heads, size, ...), with zeros behind the last row."""
    missing = -array.shape[2] % size
    padded = jnp.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)])
    batch, heads, rows, width = padded.shape
    return jnp.moveaxis(padded.reshape(batch, heads, rows // size, size, width), 2, 0)


def _whole(blocks, rows):
    """The inverse of `_in_blocks`."""
    joined = jnp.moveaxis(blocks, 0, 2)
    return joined.reshape(*joined.shape[:2], -1, *joined.shape[4:])[:, :, :rows]


def _block_inputs(arrays, mask, size):
    """What a scan over blocks takes: the number of each, its rows of `arrays` and of the mask."""
    blocks = [_in_blocks(array, size) for array in arrays]
    by_row = mask is not None and mask.shape[2] > 1
    return jnp.arange(blocks[0].shape[0], dtype=jnp.int32), blocks, _in_blocks(mask, size) if by_row else None


def _first_row(index, size, first):
    return None if first is None else index * size + first


def _forward_in_blocks(query, key, value, mask, first, scale, size):
    def block(carry, inputs):
        index, (rows,), own = inputs
        start = _first_row(index, size, first)
        return carry, _forward_at_once(rows, key, value, mask if own is None else own, start, scale)

    _, (out, logsumexp) = lax.scan(block, None, _block_inputs([query], mask, size))
    return _whole(out, query.shape[2]), _whole(logsumexp, query.shape[2])


def _backward_in_blocks(grad, query, key, value, out, mask, first, scale, size):
    def block(sums, inputs):
        index, (grads, rows, outs), own = inputs
        start = _first_row(index, size, first)
        masked = mask if own is None else own
        grad_rows, *more = _backward_at_once(grads, rows, key, value, outs, masked, start, scale)
        return [total + part for total, part in zip(sums, more, strict=True)], grad_rows

    wide = jnp.promote_types(query.dtype, jnp.float32)
    zeros = [jnp.zeros((*key.shape[:2], key.shape[3], key.shape[2]), wide) for _ in range(2)]
    sums, grad_query = lax.scan(block, zeros, _block_inputs([grad, query, out], mask, size))
    return _whole(grad_query, query.shape[2]), *sums


def _forward(query, key, value, mask, first, scale):
    size = _rows_at_once(query, key)
    if size is None:
        return _forward_at_once(query, key, value, mask, first, scale)
    return _forward_in_blocks(query, key, value, mask, first, scale, size)


def _backward(grad, query, key, value, out, mask, first, scale):
    size = _rows_at_once(query, key)
    if size is None:
        return _backward_at_once(grad, query, key, value, out, mask, first, scale)
    return _backward_in_blocks(grad, query, key, value, out, mask, first, scale, size)


# in spans of queries, of which each sees the keys up to its end


class _Span(NamedTuple):
    start: int
    stop: int
    keys: int

    def rows(self, array):
        return array[:, :, self.start : self.stop]

    def seen(self, array):
        return array[:, :, : self.keys]


def _spans(rows, columns):
    size = max(-(-rows // _SPANS), _SHORTEST_SPAN)
    return [_Span(start, min(start + size, rows), min(start + size, columns)) for start in range(0, rows, size)]


def _forward_in_spans(query, key, value, scale):
    parts = [
        _forward(span.rows(query), span.seen(key), span.seen(value), None, span.start, scale)
        for span in _spans(query.shape[2], key.shape[2])
    ]
    out, logsumexp = (jnp.concatenate(part, 2) for part in zip(*parts, strict=True))
    return out, logsumexp


def _backward_in_spans(grad, query, key, value, out, scale):
    grad_queries, sums = [], []
    for span in _spans(query.shape[2], key.shape[2]):
        own = (span.rows(grad), span.rows(query), span.seen(key), span.seen(value), span.rows(out))
        grad_query, *more = _backward(*own, None, span.start, scale)
        grad_queries.append(grad_query)
        unseen = [(0, 0), (0, 0), (0, 0), (0, key.shape[2] - span.keys)]
        sums.append([jnp.pad(part, unseen) for part in more])
    return jnp.concatenate(grad_queries, 2), *(sum(parts[1:], parts[0]) for parts in zip(*sums, strict=True))


# operators


def _arguments(query, attn_mask, scale):
    mask = attn_mask
    if mask is not None and mask.ndim == 2:
        mask = mask[None, None]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return mask, jnp.asarray(query.shape[3] ** -0.5 if scale is None else scale).astype(wide)


def _without_dropout(*args, dropout_p=0.0, **kwargs):
    """Forward and backward have `dropout_p` behind three and six tensors."""
    return next((arg for arg in args if isinstance(arg, float)), dropout_p) == 0.0


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@lowering(_ATTENTION, static=("dropout_p",), supports=_without_dropout, takes_specs=True)
def flash_attention(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, out_specs):
    mask, scale = _arguments(query, attn_mask, getattr(scale, "array", scale))
    query, scale = _scaled(query, scale)

    def whole(query, key, value):
        return _forward(query, key, value, mask, 0 if is_causal else None, scale)

    def in_spans(query, key, value):
        return _forward_in_spans(query, key, value, scale)

    out, logsumexp = on_cpu_or_else(in_spans if is_causal else whole, whole, query, key, value)
    return out, logsumexp.astype(to_numpy(out_specs[1].dtype))


@lowering(f"{_ATTENTION}_backward", static=("dropout_p",), supports=_without_dropout)
def flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    mask, scale = _arguments(query, attn_mask, scale)
    scaled, left = _scaled(query, scale)

    def whole(grad, query, key, value, out):
        return _backward(grad, query, key, value, out, mask, 0 if is_causal else None, left)

    def in_spans(grad, query, key, value, out):
        return _backward_in_spans(grad, query, key, value, out, left)

    arrays = (grad_out, scaled, key, value, out)
    grad_query, *others = on_cpu_or_else(in_spans if is_causal else whole, whole, *arrays)
    grad_key, grad_value = (grad.swapaxes(2, 3).astype(key.dtype) for grad in others)
    return grad_query if left is not None else _times(grad_query, scale), grad_key, grad_value
