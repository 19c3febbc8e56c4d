"""One step of LSTM and GRU, of which torch makes recurrent layers on devices of its own, and weight normalization.

`workspace` is what the gradient needs: the gates after their activations (for GRU also the state and its share in the
new one). Gates are in torch's order.
"""

import jax
import jax.numpy as jnp

from xlatrainer.backend.dtypes import compute_dtype, from_numpy, to_numpy
from xlatrainer.backend.lowerings.fusion import materialized
from xlatrainer.backend.lowerings.registry import lowering


def _wide(array):
    return array.astype(compute_dtype(from_numpy(array.dtype)))


def _biased(gates, bias):
    return _wide(gates) if bias is None else _wide(gates) + _wide(bias)


def _as(dtype, *arrays):
    """In memory on the CPU: a step's state would be computed again from those of all steps before it."""
    return materialized(*(array.astype(dtype) for array in arrays))


@lowering("_thnn_fused_lstm_cell")
def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    enter, forget, new, show = jnp.split(gates, 4, 1)
    enter, forget, new, show = jax.nn.sigmoid(enter), jax.nn.sigmoid(forget), jnp.tanh(new), jax.nn.sigmoid(show)
    cy = forget * _wide(cx) + enter * new
    return _as(cx.dtype, show * jnp.tanh(cy), cy, jnp.concatenate([enter, forget, new, show], 1))


@lowering("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    enter, forget, new, show = jnp.split(_wide(workspace), 4, 1)
    state = jnp.tanh(_wide(cy))
    grad_hy = 0 if grad_hy is None else _wide(grad_hy)
    grad_cell = grad_hy * show * (1 - state * state) + (0 if grad_cy is None else _wide(grad_cy))
    grads = [
        grad_cell * new * enter * (1 - enter),
        grad_cell * _wide(cx) * forget * (1 - forget),
        grad_cell * enter * (1 - new * new),
        grad_hy * state * show * (1 - show),
    ]
    gates = jnp.concatenate(grads, 1)
    results = _as(cx.dtype, gates, grad_cell * forget, jnp.sum(gates, 0))
    return results if has_bias else (*results[:2], None)


@lowering("_thnn_fused_gru_cell")
def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    given, kept = _biased(input_gates, input_bias), _biased(hidden_gates, hidden_bias)
    given_reset, given_update, given_new = jnp.split(given, 3, 1)
    kept_reset, kept_update, kept_new = jnp.split(kept, 3, 1)
    reset, update = jax.nn.sigmoid(given_reset + kept_reset), jax.nn.sigmoid(given_update + kept_update)
    new = jnp.tanh(given_new + reset * kept_new)
    state = _wide(hx)
    return _as(hx.dtype, new + update * (state - new), jnp.concatenate([reset, update, new, state, kept_new], 1))


@lowering("_thnn_fused_gru_cell_backward")
def gru_cell_backward(grad_hy, workspace, has_bias):
    reset, update, new, state, kept_new = jnp.split(_wide(workspace), 5, 1)
    grad = _wide(grad_hy)
    grad_update = grad * (state - new) * update * (1 - update)
    grad_new = grad * (1 - update) * (1 - new * new)
    grad_reset = grad_new * kept_new * reset * (1 - reset)
    given = jnp.concatenate([grad_reset, grad_update, grad_new], 1)
    kept = jnp.concatenate([grad_reset, grad_update, grad_new * reset], 1)
    results = _as(grad_hy.dtype, given, kept, grad * update, jnp.sum(given, 0), jnp.sum(kept, 0))
    return results if has_bias else (*results[:3], None, None)


def _others(array, dim):
    return tuple(axis for axis in range(array.ndim) if axis != dim % array.ndim)


@lowering("_weight_norm_interface", takes_specs=True)
def weight_norm(v, g, dim=0, *, out_specs):
    wide = _wide(v)
    norms = jnp.sqrt(jnp.sum(wide * wide, _others(v, dim), keepdims=True))
    spec = out_specs[1]
    return (wide * (_wide(g) / norms)).astype(v.dtype), norms.reshape(spec.shape).astype(to_numpy(spec.dtype))


@lowering("_weight_norm_interface_backward")
def weight_norm_backward(grad_w, saved_v, saved_g, saved_norms, dim):
    grad, v, g, norms = map(_wide, (grad_w, saved_v, saved_g, saved_norms))
    along = jnp.sum(grad * v, _others(v, dim), keepdims=True)
    grad_v = g / norms * (grad - v * (along / (norms * norms)))
    return grad_v.astype(saved_v.dtype), (along / norms).astype(saved_g.dtype)
