"""A layer of an LSTM, GRU or RNN in one direction, as one loop over time, and its gradient, as another.

What does not depend on the step before is taken out of the loops: the product of all inputs with their weights comes
before, the gradients of weights are one product each after. `states`, `cells` and `gates` are what the gradient needs:
for each step the new state, the new cell, and the gates after their activations (see `recurrent.py` for their order).

Packed sequences are data without gaps, and how many sequences reach each step. Their lengths are data, so that other
lengths run the same program: rows are put in their places of a padded batch, in which a sequence that has ended, or
backwards has not begun, keeps its state.

Shapes: input (T, B, F), or packed (N, F), hx (B, P), cx (B, H), w_ih (G, F), w_hh (G, P), w_hr (P, H), states (T, B, P),
cells (T, B, H). T: time, B: batch, N: rows of all sequences, F: features, H: hidden size, P: projected size (H without
a projection), G: all gates, H for each.

May import: linalg, fusion, leading_axes, partitioning, platforms, registry, dtypes.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.dtypes import compute_dtype, from_numpy
from xlatrainer.backend.lowerings import leading_axes
from xlatrainer.backend.lowerings.fusion import materialized
from xlatrainer.backend.lowerings.linalg import dot_precision, matmul
from xlatrainer.backend.lowerings.partitioning import partitioned
from xlatrainer.backend.lowerings.platforms import lowered_for
from xlatrainer.backend.lowerings.registry import lowering


def _wide(array):
    return array.astype(compute_dtype(from_numpy(array.dtype)))


def _split(gates, count):
    return jnp.split(gates, count, -1)


def _joined(*parts):
    return jnp.concatenate(parts, -1)


class _LSTM:
    """`given` and `kept` are the shares of the input and of the last state in the gates, biases included."""

    @staticmethod
    def forward(given, kept, state, cell):
        enter, forget, new, show = _split(given + kept, 4)
        enter, forget, new, show = jax.nn.sigmoid(enter), jax.nn.sigmoid(forget), jnp.tanh(new), jax.nn.sigmoid(show)
        after = forget * cell + enter * new
        return show * jnp.tanh(after), after, _joined(enter, forget, new, show)

    @staticmethod
    def backward(grad, grad_cell, gates, before, after, cell_before, cell_after):
        """Gradients of `given`, of `kept`, of the last state where it is used by itself, and of the last cell."""
        enter, forget, new, show = _split(gates, 4)
        shown = jnp.tanh(cell_after)
        grad_cell = grad * show * (1 - shown * shown) + grad_cell
        given = _joined(
            grad_cell * new * enter * (1 - enter),
            grad_cell * cell_before * forget * (1 - forget),
            grad_cell * enter * (1 - new * new),
            grad * shown * show * (1 - show),
        )
        return given, given, None, grad_cell * forget


class _GRU:
    @staticmethod
    def forward(given, kept, state, cell):
        given_reset, given_update, given_new = _split(given, 3)
        kept_reset, kept_update, kept_new = _split(kept, 3)
        reset, update = jax.nn.sigmoid(given_reset + kept_reset), jax.nn.sigmoid(given_update + kept_update)
        new = jnp.tanh(given_new + reset * kept_new)
        return new + update * (state - new), None, _joined(reset, update, new, kept_new)

    @staticmethod
    def backward(grad, grad_cell, gates, before, after, cell_before, cell_after):
        reset, update, new, kept_new = _split(gates, 4)
        grad_update = grad * (before - new) * update * (1 - update)
        grad_new = grad * (1 - update) * (1 - new * new)
        grad_reset = grad_new * kept_new * reset * (1 - reset)
        given, kept = (_joined(grad_reset, grad_update, last) for last in (grad_new, grad_new * reset))
        return given, kept, grad * update, None


class _Tanh:
    @staticmethod
    def forward(given, kept, state, cell):
        return jnp.tanh(given + kept), None, None

    @staticmethod
    def backward(grad, grad_cell, gates, before, after, cell_before, cell_after):
        given = grad * (1 - after * after)
        return given, given, None, None


class _ReLU:
    @staticmethod
    def forward(given, kept, state, cell):
        return jax.nn.relu(given + kept), None, None

    @staticmethod
    def backward(grad, grad_cell, gates, before, after, cell_before, cell_after):
        given = jnp.where(after > 0, grad, 0)
        return given, given, None, None


_CELLS = {"lstm": _LSTM, "gru": _GRU, "rnn_tanh": _Tanh, "rnn_relu": _ReLU}


class _Packed(NamedTuple):
    """Where the rows of packed sequences are in a padded batch, and back."""

    rows: Any  # (T, B)
    active: Any  # (T, B, 1): there is such a row
    places: Any  # (N)

    def padded(self, packed):
        """(T, B, ...) of (N, ...); where there is no row any other one."""
        return jnp.take(packed, self.rows, axis=0, mode="clip")

    def packed(self, padded):
        return jnp.take(padded.reshape(-1, padded.shape[-1]), self.places, axis=0, mode="clip")


def _packed(batch_sizes, batch, count):
    ends = jnp.cumsum(batch_sizes)
    starts = ends - batch_sizes
    row = jnp.arange(batch)
    step = jnp.repeat(jnp.arange(batch_sizes.shape[0]), batch_sizes, total_repeat_length=count)
    places = step * batch + jnp.arange(count) - starts[step]
    return _Packed(starts[:, None] + row, (row < batch_sizes[:, None])[..., None], places)


def _product_of_rows(rows, weight, dtype):
    """`rows @ weight`, of rows with any dims in front of the last."""
    product = matmul(rows.reshape(-1, rows.shape[-1]), weight, dtype)
    return product.reshape(*rows.shape[:-1], weight.shape[1])


def _times(rows, weight, dtype):
    """For all steps; partitioned by dims: one dim of steps and sequences would have no sharding."""
    dims = "tb" if rows.ndim == 3 else "n"
    function = partial(_product_of_rows, dtype=dtype)
    return partitioned(function, f"{dims}i,ij->{dims}j", f"{dims}ij", rows, weight)


def _sum_of_products(grad, rows):
    return matmul(grad.reshape(-1, grad.shape[-1]).T, rows.reshape(-1, rows.shape[-1]))


def _weight_gradient(grad, rows):
    dims = "tb" if rows.ndim == 3 else "n"
    return partitioned(_sum_of_products, f"{dims}i,{dims}j->ij", f"{dims}ij", grad, rows)


class _Weight:
    """A matrix that each step of a loop multiplies with: written out once, as the CPU's products like it best."""

    def __init__(self, weight):
        wide = lowered_for() == "cpu"  # whose products of half types would convert it in each step
        self.array = materialized(_wide(weight) if wide else weight)

    def __call__(self, rows):
        dtype = self.array.dtype
        wide = compute_dtype(from_numpy(dtype))
        return jnp.matmul(rows.astype(dtype), self.array, precision=dot_precision(), preferred_element_type=wide)


def _biases(b_ih, b_hh, mode):
    """What is added to the share of the input, and to that of the state: a GRU multiplies the latter."""
    if b_ih is None:
        return 0, 0
    if mode == "gru":
        return _wide(b_ih), _wide(b_hh)
    return _wide(b_ih) + _wide(b_hh), 0


@lowering("xlatrainer::recurrent_layer")
def recurrent_layer(input, hx, cx, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, mode, reverse):
    dtype = hx.dtype
    forward = _CELLS[mode].forward
    bias, bias_of_state = _biases(b_ih, b_hh, mode)
    given = _times(input, w_ih.T, compute_dtype(from_numpy(dtype))) + bias
    packed = None if batch_sizes is None else _packed(batch_sizes, hx.shape[0], input.shape[0])
    of_state, projected = _Weight(w_hh.T), None if w_hr is None else _Weight(w_hr.T)

    def step(last, given_and_active):
        given, active = given_and_active
        kept = of_state(last[0]) + bias_of_state
        state, cell, gates = forward(given, kept, _wide(last[0]), None if cx is None else _wide(last[1]))
        if projected is not None:
            state = projected(state.astype(dtype))
        now = tuple(None if array is None else array.astype(dtype) for array in (state, cell))
        if active is not None:
            now = tuple(None if a is None else jnp.where(active, a, b) for a, b in zip(now, last, strict=True))
        return now, (*now, None if gates is None else gates.astype(dtype))

    steps = (given, None) if packed is None else (packed.padded(given), packed.active)
    (hy, cy), (states, cells, gates) = lax.scan(step, (hx, cx), materialized_steps(steps), reverse=reverse)
    return states if packed is None else packed.packed(states), hy, cy, states, cells, gates


def materialized_steps(steps):
    """Written to memory on the CPU, so that a loop reads what comes before it instead of computing it in each step."""
    return tuple(None if array is None else materialized(array) for array in steps)


def _before(first, steps, reverse):
    """What each step began with: `first`, then what the step before gave."""
    if first is None:
        return None
    parts = (steps[1:], first[None]) if reverse else (first[None], steps[:-1])
    return jnp.concatenate(parts)


@lowering("xlatrainer::recurrent_layer_backward")
def recurrent_layer_backward(
    grad_output, grad_hy, grad_cy, input, hx, cx, w_ih, w_hh, w_hr, batch_sizes, states, cells, gates, mode, reverse
):
    dtype = hx.dtype
    backward = _CELLS[mode].backward
    packed = None if batch_sizes is None else _packed(batch_sizes, hx.shape[0], input.shape[0])
    before, cells_before = _before(hx, states, reverse), _before(cx, cells, reverse)
    of_gates, of_projection = _Weight(w_hh), None if w_hr is None else _Weight(w_hr)
    if grad_output is not None and packed is not None:
        grad_output = packed.padded(grad_output)

    def step(grads, saved):
        grad_output, active, gates, *around = saved
        grad_state, grad_cell = grads
        if grad_output is not None:
            grad_output = _wide(grad_output)
            grad_state += grad_output if active is None else jnp.where(active, grad_output, 0)
        grad_hidden = grad_state if of_projection is None else of_projection(grad_state)
        around = [None if array is None else _wide(array) for array in (gates, *around)]
        given, kept, direct, cell = backward(grad_hidden, grad_cell, *around)
        shares = tuple(array.astype(dtype) for array in ((given,) if kept is given else (given, kept)))
        state = of_gates(shares[-1])
        state = state if direct is None else state + direct
        now = state, cell
        if active is not None:
            shares = tuple(jnp.where(active, array, 0) for array in shares)
            now = tuple(None if a is None else jnp.where(active, a, b) for a, b in zip(now, grads, strict=True))
        return now, (shares, None if of_projection is None else grad_state.astype(dtype))

    def start(grad, like):
        return None if like is None else jnp.zeros_like(_wide(like)) if grad is None else _wide(grad)

    steps = (grad_output, None if packed is None else packed.active, gates, before, states, cells_before, cells)
    ends = (start(grad_hy, hx), start(grad_cy, cx))
    (grad_hx, grad_cx), (shares, grad_projected) = lax.scan(step, ends, materialized_steps(steps), reverse=not reverse)
    given = shares[0] if packed is None else packed.packed(shares[0])
    grad_b_ih, grad_b_hh = (leading_axes.total(_wide(share), (0, 1)).astype(dtype) for share in (shares[0], shares[-1]))
    grad_w_hr = None
    if grad_projected is not None:
        if packed is not None:
            grad_projected = jnp.where(packed.active, grad_projected, 0)
        show = _split(_wide(gates), 4)[3]
        grad_w_hr = _weight_gradient(grad_projected, (show * jnp.tanh(_wide(cells))).astype(dtype))
    return (
        _times(given, w_ih, dtype),
        grad_hx.astype(dtype),
        None if grad_cx is None else grad_cx.astype(dtype),
        _weight_gradient(given, input),
        _weight_gradient(shares[-1], before),
        grad_b_ih,
        grad_b_hh,
        grad_w_hr,
    )
