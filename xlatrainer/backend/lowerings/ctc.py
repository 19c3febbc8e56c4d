"""Connectionist temporal classification: the probability of all alignments of labels with a sequence, and its gradient.

States are the labels with a blank between, before and behind them, 2 S + 1 for S labels. All in logarithms, one scan
over time. Lengths are data here, so that batches of other lengths run the same program; `composites` sees to that.

Shapes: log_probs (T, N, C), targets (N, S), lengths (N), log_alpha (N, T, 2 S + 1). T: time, N: batch, C: classes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.dtypes import compute_dtype, from_numpy
from xlatrainer.backend.lowerings.checks import holds
from xlatrainer.backend.lowerings.registry import lowering


def _wide(array):
    return array.astype(compute_dtype(from_numpy(array.dtype)))


def _states(targets, blank):
    """The label of every state, and which states may be entered from the last but one: a label that differs from it."""
    batch, length = targets.shape
    labels = jnp.full((batch, 2 * length + 1), blank, targets.dtype).at[:, 1::2].set(targets)
    before = jnp.pad(labels, ((0, 0), (2, 0)), constant_values=blank)[:, :-2]
    return labels, (labels != blank) & (labels != before)


def _emissions(log_probs, labels):
    """The log-probability of the label of each state, (T, N, 2 S + 1)."""
    return jnp.take_along_axis(log_probs, labels[None], axis=2, mode="clip")


def _shifted(states, steps):
    """States moved to the right, or to the left by a negative number of steps; what comes in is impossible."""
    pad = (max(steps, 0), max(-steps, 0))
    width = states.shape[1]
    padded = jnp.pad(states, ((0, 0), pad), constant_values=-jnp.inf)
    return padded[:, :width] if steps > 0 else padded[:, -width:]


def _step(states, skips, direction):
    """Log-probability of reaching each state from itself, its neighbour, and the one after that where allowed."""
    return jnp.logaddexp(jnp.logaddexp(states, _shifted(states, direction)), skips)


def _alphas(emissions, may_skip):
    place = jnp.arange(emissions.shape[2])
    first = jnp.where(place < 2, emissions[0], -jnp.inf)

    def forward(alpha, emission):
        skips = jnp.where(may_skip, _shifted(alpha, 2), -jnp.inf)
        alpha = _step(alpha, skips, 1) + emission
        return alpha, alpha

    _, rest = lax.scan(forward, first, emissions[1:])
    return jnp.concatenate([first[None], rest])


def _betas(emissions, may_skip, input_lengths, target_lengths):
    place, ends = jnp.arange(emissions.shape[2]), 2 * target_lengths[:, None]
    is_end = (place == ends) | ((place == ends - 1) & (ends > 0))

    def backward(beta, step):
        time, emission = step
        skips = _shifted(jnp.where(may_skip, beta, -jnp.inf), -2)
        reached = _step(beta, skips, -1) + emission
        ended = jnp.where(is_end, emission, -jnp.inf)
        last = input_lengths[:, None] - 1
        beta = jnp.where(time > last, -jnp.inf, jnp.where(time == last, ended, reached))
        return beta, beta

    start = jnp.full(emissions.shape[1:], -jnp.inf, emissions.dtype)
    times = jnp.arange(emissions.shape[0])
    return lax.scan(backward, start, (times, emissions), reverse=True)[1]


@lowering("_ctc_loss.Tensor")
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """`zero_infinity` is applied by the caller, and in the gradient."""
    message = f"Expected input_lengths to have value at most {log_probs.shape[0]} (in ctc_loss)"
    holds(input_lengths <= log_probs.shape[0], RuntimeError, message)
    message = f"Expected target_lengths to have value at most {targets.shape[1]} (in ctc_loss)"
    holds(target_lengths <= targets.shape[1], RuntimeError, message)
    labels, may_skip = _states(targets, blank)
    alphas = _alphas(_emissions(_wide(log_probs), labels), may_skip)
    lasts = jnp.take_along_axis(alphas, jnp.maximum(input_lengths - 1, 0)[None, :, None], axis=0)[0]
    place, ends = jnp.arange(labels.shape[1]), 2 * target_lengths[:, None]
    final = (place == ends) | ((place == ends - 1) & (ends > 0))
    likelihood = jax.nn.logsumexp(lasts, axis=1, where=final)
    nothing = jnp.where(target_lengths == 0, 0, -jnp.inf)
    likelihood = jnp.where(input_lengths == 0, nothing, likelihood)
    return (-likelihood).astype(log_probs.dtype), jnp.moveaxis(alphas, 0, 1).astype(log_probs.dtype)


@lowering("_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    grad,
    log_probs,
    targets,
    input_lengths,
    target_lengths,
    neg_log_likelihood,
    log_alpha,
    blank,
    zero_infinity=False,
):
    """The probability of each class less that of the states that stand for it, given the labels."""
    wide, loss = _wide(log_probs), _wide(neg_log_likelihood)[:, None]
    labels, may_skip = _states(targets, blank)
    emissions = _emissions(wide, labels)
    betas = _betas(emissions, may_skip, input_lengths, target_lengths)
    paths = jnp.moveaxis(_wide(log_alpha), 1, 0) + betas
    given = jnp.where(paths == -jnp.inf, 0, jnp.exp(paths + loss - emissions))
    time, batch, _ = log_probs.shape
    rows = jnp.arange(time)[:, None, None], jnp.arange(batch)[None, :, None], labels[None]
    slope = jnp.exp(wide).at[rows].add(-given, mode="drop")
    impossible = jnp.isinf(loss)
    slope = jnp.where(impossible, 0 if zero_infinity else jnp.nan, slope)
    within = jnp.arange(time)[:, None, None] < input_lengths[:, None]
    return jnp.where(within, slope * _wide(grad)[:, None], 0).astype(log_probs.dtype)
