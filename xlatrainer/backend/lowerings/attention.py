"""Attention as one operator, with its gradient: what torch's CPU kernel computes in blocks."""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from xlatrainer.backend.lowerings.registry import lowering


def _without_dropout(*args, dropout_p=0.0, **kwargs):
    """Forward and backward have `dropout_p` behind three and six tensors."""
    given = next((arg for arg in args if isinstance(arg, float)), dropout_p)
    return given == 0.0


def _scores(query, key, is_causal, attn_mask, scale):
    """Scaled products of queries and keys with the mask, (batch, heads, queries, keys), in float32 at least."""
    acc = jnp.promote_types(query.dtype, jnp.float32)
    factor = 1 / query.shape[-1] ** 0.5 if scale is None else scale
    scores = jnp.einsum("bhqe,bhke->bhqk", query.astype(acc), key.astype(acc)) * jnp.asarray(factor, acc)
    if attn_mask is not None:
        scores = scores + attn_mask.astype(acc)
    if is_causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    return scores


@lowering("_scaled_dot_product_flash_attention_for_cpu", static=("dropout_p",), supports=_without_dropout)
def flash_attention(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """The output, and the logarithm of each query's sum of exponentials."""
    scores = _scores(query, key, is_causal, attn_mask, scale)
    total = logsumexp(scores, -1)
    weights = jnp.exp(scores - total[..., None])
    return jnp.einsum("bhqk,bhke->bhqe", weights, value.astype(weights.dtype)).astype(query.dtype), total


@lowering("_scaled_dot_product_flash_attention_for_cpu_backward", static=("dropout_p",), supports=_without_dropout)
def flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    """Normalizes anew instead of by `logsumexp`, whose rounding would be in every weight."""
    weights = jax.nn.softmax(_scores(query, key, is_causal, attn_mask, scale), -1)
    acc = weights.dtype
    grad, q, k, v = (array.astype(acc) for array in (grad_out, query, key, value))
    pulled = jnp.einsum("bhqe,bhke->bhqk", grad, v)
    pulled = weights * (pulled - jnp.sum(weights * pulled, -1, keepdims=True))
    pulled = pulled * jnp.asarray(1 / query.shape[-1] ** 0.5 if scale is None else scale, acc)
    return (
        jnp.einsum("bhqk,bhke->bhqe", pulled, k).astype(query.dtype),
        jnp.einsum("bhqk,bhqe->bhke", pulled, q).astype(key.dtype),
        jnp.einsum("bhqk,bhqe->bhke", weights, grad).astype(value.dtype),
    )
