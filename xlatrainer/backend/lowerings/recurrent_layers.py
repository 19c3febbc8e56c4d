"""A layer of an LSTM, GRU or RNN in one direction, as one loop over time, and its gradient, as another.

What does not depend on the step before is taken out of the loops: the product of all inputs with their weights comes
before, the gradients of weights are one product each after. `states`, `cells` and `gates` are what the gradient needs
of each step, if one is asked for: the new state, the new cell, and the gates after their activations, in torch's order.

Packed sequences are data without gaps, and how many sequences reach each step. Their lengths are data, so that other
lengths run the same program: rows are put in their places of a padded batch, in which a sequence that has ended, or
backwards has not begun, keeps its state.

Shapes: input (T, B, F), or packed (N, F), hx (B, P), cx (B, H), w_ih (G, F), w_hh (G, P), w_hr (P, H), states
(T, B, P), cells (T, B, H), gates (T, B, G). T: time, B: batch, N: rows of all sequences, F: features, H: hidden size,
P: projected size (H without a projection), G: all gates, H for each.

May import: linalg, fusion, leading_axes, packed_sequences, partitioning, platforms, registry, dtypes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.dtypes import compute_dtype, from_numpy
from xlatrainer.backend.lowerings import leading_axes
from xlatrainer.backend.lowerings.fusion import materialized
from xlatrainer.backend.lowerings.linalg import dot_precision, matmul
from xlatrainer.backend.lowerings.packed_sequences import places
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
    """`given` and `kept` are the shares of the input and of the last state in the gates, biases included.

    Beside the new state and the gates there is what is saved as `cells`.
    """

    @staticmethod
    def forward(given, kept, state, cell):
        enter, forget, new, show = _split(given + kept, 4)
        gates = _joined(jax.nn.sigmoid(enter), jax.nn.sigmoid(forget), jnp.tanh(new), jax.nn.sigmoid(show))
        gates = materialized(gates)  # or they are computed for the cell, for the state and for themselves
        enter, forget, new, show = _split(gates, 4)
        after = materialized(forget * cell + enter * new)
        return show * jnp.tanh(after), after, gates

    @staticmethod
    def backward(grad, grad_cell, gates, before, after, cell_before, cell_after):
        """Gradients of `given`, of what of `kept` is another, of the state by itself, and of the last cell."""
        enter, forget, new, show = _split(gates, 4)
        shown = jnp.tanh(cell_after)
        grad_cell = grad * show * (1 - shown * shown) + grad_cell
        given = _joined(
            grad_cell * new * enter * (1 - enter),
            grad_cell * cell_before * forget * (1 - forget),
            grad_cell * enter * (1 - new * new),
            grad * shown * show * (1 - show),
        )
        return given, None, None, grad_cell * forget


class _GRU:
    """What is saved as `cells` is the share of the state in the new state."""

    @staticmethod
    def forward(given, kept, state, cell):
        (*given_two, given_new), (*kept_two, kept_new) = _split(given, 3), _split(kept, 3)
        reset, update = _split(materialized(jax.nn.sigmoid(_joined(*given_two) + _joined(*kept_two))), 2)
        new = materialized(jnp.tanh(given_new + reset * kept_new))
        return new + update * (state - new), kept_new, _joined(reset, update, new)

    @staticmethod
    def backward(grad, grad_cell, gates, before, after, cell_before, kept_new):
        reset, update, new = _split(gates, 3)
        grad_update = grad * (before - new) * update * (1 - update)
        grad_new = grad * (1 - update) * (1 - new * new)
        grad_reset = grad_new * kept_new * reset * (1 - reset)
        return _joined(grad_reset, grad_update, grad_new), grad_new * reset, grad * update, None


class _Tanh:
    @staticmethod
    def forward(given, kept, state, cell):
        return jnp.tanh(given + kept), None, None

    @staticmethod
    def backward(grad, grad_cell, gates, before, after, cell_before, cell_after):
        given = grad * (1 - after * after)
        return given, None, None, None


class _ReLU:
    @staticmethod
    def forward(given, kept, state, cell):
        return jax.nn.relu(given + kept), None, None

    @staticmethod
    def backward(grad, grad_cell, gates, before, after, cell_before, cell_after):
        given = jnp.where(after > 0, grad, 0)
        return given, None, None, None


_CELLS = {"lstm": _LSTM, "gru": _GRU, "rnn_tanh": _Tanh, "rnn_relu": _ReLU}
_WITH_GATES = ("lstm", "gru")
_STEPS_THAT_PAY = 16  # for transposing a matrix before a loop that multiplies with it


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
    """`grad.T @ rows`. The CPU gives it to a slower library unless what is transposed was written out: the narrower."""
    grad, rows = (array.reshape(-1, array.shape[-1]) for array in (grad, rows))
    if grad.shape[1] < rows.shape[1]:
        return matmul(materialized(grad.T), rows)
    return materialized(matmul(materialized(rows.T), grad)).T


def _weight_gradient(grad, rows):
    dims = "tb" if rows.ndim == 3 else "n"
    return partitioned(_sum_of_products, f"{dims}i,{dims}j->ij", f"{dims}ij", grad, rows)


class _Weight:
    """A matrix that each of `steps` multiplies with: on the CPU written out once as its products like it best."""

    def __init__(self, weight, steps):
        wide = lowered_for() == "cpu"  # whose products of half types would convert it in each step
        array = _wide(weight) if wide else weight
        self.array = materialized(array) if steps >= _STEPS_THAT_PAY else array

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


def _in_memory(array):
    """A loop reads what comes before it, instead of computing it in each step."""
    return None if array is None else materialized(array)


def _at(array, time):
    return None if array is None else lax.dynamic_index_in_dim(array, time, keepdims=False)


def _written(array, row, time):
    return lax.dynamic_update_index_in_dim(array, row.astype(array.dtype), time, 0)


def _where(active, now, last):
    """Where a sequence is active what is new, else what was last."""
    return tuple(None if new is None else jnp.where(active, new, old) for new, old in zip(now, last, strict=True))


@lowering("xlatrainer::recurrent_layer")
def recurrent_layer(input, hx, cx, w_ih, w_hh, b_ih, b_hh, w_hr, batch_sizes, mode, reverse, save):
    """The gates are written over the shares of the input, so that there is one large array and not two."""
    dtype = hx.dtype
    forward = _CELLS[mode].forward
    bias, bias_of_state = _biases(b_ih, b_hh, mode)
    given = (_times(input, w_ih.T, compute_dtype(from_numpy(dtype))) + bias).astype(dtype)
    packed = None if batch_sizes is None else places(batch_sizes, hx.shape[0], input.shape[0])
    given, active = (given, None) if packed is None else (packed.padded(given), packed.active[..., None])
    steps = given.shape[0]
    of_state, projected = _Weight(w_hh.T, steps), None if w_hr is None else _Weight(w_hr.T, steps)

    def step(carry, time):
        last, gates = carry
        given, active_now = _wide(_at(gates, time)), _at(active, time)
        kept = of_state(last[0]) + bias_of_state
        state, cell, new_gates = forward(given, kept, _wide(last[0]), None if cx is None else _wide(last[1]))
        if projected is not None:
            state = projected(state.astype(dtype))
        state, cell = (None if array is None else array.astype(dtype) for array in (state, cell))
        now = state, None if cx is None else cell
        if active_now is not None:
            now = _where(active_now, now, last)
        if save and new_gates is not None:
            gates = _written(gates, new_gates, time)
        return (now, gates), (now[0], (cell if cx is None else now[1]) if save else None)

    times = jnp.arange(steps)
    (ends, gates), (states, cells) = lax.scan(step, ((hx, cx), _in_memory(given)), times, reverse=reverse)
    saved = (states, cells, gates if mode in _WITH_GATES else None) if save else (None, None, None)
    return states if packed is None else packed.packed(states), *ends, *saved


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
    packed = None if batch_sizes is None else places(batch_sizes, hx.shape[0], input.shape[0])
    if grad_output is not None and packed is not None:
        grad_output = packed.padded(grad_output)
    loop = _Backwards(grad_output, packed, hx, cx, w_hh, w_hr, states, cells, gates, mode, reverse)
    (grad_hx, grad_cx), given, kept, grad_projected = loop.run(grad_hy, grad_cy)
    rows = given if packed is None else packed.packed(given)
    grad_bias = leading_axes.total(_wide(given), (0, 1)).astype(dtype)
    grad_w_hr = None
    if grad_projected is not None:
        grad_projected = grad_projected if packed is None else jnp.where(packed.active[..., None], grad_projected, 0)
        show = _split(_wide(gates), 4)[3]
        grad_w_hr = _weight_gradient(grad_projected, (show * jnp.tanh(_wide(cells))).astype(dtype))
    return (
        _times(rows, w_ih, dtype),
        grad_hx.astype(dtype),
        None if grad_cx is None else grad_cx.astype(dtype),
        _weight_gradient(rows, input),
        _weight_gradient(kept, loop.before),
        grad_bias,
        grad_bias if kept is given else leading_axes.total(_wide(kept), (0, 1)).astype(dtype),
        grad_w_hr,
    )


class _Backwards:
    """The loop of the gradient, which goes through time the other way."""

    def __init__(self, grad_output, packed, hx, cx, w_hh, w_hr, states, cells, gates, mode, reverse):
        self.cell = _CELLS[mode]
        self.dtype = hx.dtype
        self.reverse = reverse
        self.hx, self.cx = hx, cx
        self.before = _in_memory(_before(hx, states, reverse))
        self.active = None if packed is None else packed.active[..., None]
        cells_before = None if cx is None else _before(cx, cells, reverse)
        # What steps read only; the gates and `cells` of a GRU are written over.
        self.read = [_in_memory(each) for each in (grad_output, states, cells_before, None if cx is None else cells)]
        self.gates, self.kept_new = gates, cells if mode == "gru" else None
        self.steps = states.shape[0]
        self.of_gates = _Weight(w_hh, self.steps)
        self.of_projection = None if w_hr is None else _Weight(w_hr, self.steps)

    def run(self, grad_hy, grad_cy):
        """Gradients of the first state and cell, of the gates by input and by state, and of what was projected."""
        ends = _start(grad_hy, self.hx), _start(grad_cy, self.cx)
        carry = ends, self.gates, self.kept_new
        (starts, gates, kept_new), (given, projected) = lax.scan(
            self.step, carry, jnp.arange(self.steps), reverse=not self.reverse
        )
        given = gates if given is None else given
        if kept_new is None:
            return starts, given, given, projected
        kept = _joined(given[..., : -kept_new.shape[-1]], kept_new)
        return starts, given, kept, projected

    def step(self, carry, time):
        grads, gates, kept_new = carry
        grad_state, grad_cell = grads
        active = _at(self.active, time)
        grad_output, after, cell_before, cell_after = (_widened(_at(array, time)) for array in self.read)
        if grad_output is not None:
            grad_state += grad_output if active is None else jnp.where(active, grad_output, 0)
        grad_hidden = grad_state if self.of_projection is None else self.of_projection(grad_state)
        before = _wide(_at(self.before, time))
        beside = cell_after if kept_new is None else _wide(_at(kept_new, time))
        given, new, direct, cell = self.cell.backward(
            grad_hidden, grad_cell, _widened(_at(gates, time)), before, after, cell_before, beside
        )
        given, new = (None if a is None else _active(active, a.astype(self.dtype)) for a in (given, new))
        kept = given if new is None else _joined(given[..., : -new.shape[-1]], new)
        state = self.of_gates(kept)
        state = state if direct is None else state + direct
        now = (state, cell) if active is None else _where(active, (state, cell), grads)
        gates = gates if gates is None else _written(gates, given, time)
        kept_new = kept_new if new is None else _written(kept_new, new, time)
        projected = None if self.of_projection is None else grad_state.astype(self.dtype)
        return (now, gates, kept_new), (given if gates is None else None, projected)


def _widened(array):
    return None if array is None else _wide(array)


def _active(active, array):
    return array if active is None else jnp.where(active, array, 0)


def _start(grad, like):
    """The gradient that the loop begins with."""
    return None if like is None else jnp.zeros_like(_wide(like)) if grad is None else _wide(grad)
