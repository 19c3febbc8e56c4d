"""Losses and the softmax family, with their gradients.

`reduction` is torch's number: 0 none, 1 mean, 2 sum. The gradient of a mean is divided by the number of elements.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.dtypes import compute_dtype, from_numpy, to_numpy
from xlatrainer.backend.lowerings import leading_axes
from xlatrainer.backend.lowerings.checks import holds, index_in_range
from xlatrainer.backend.lowerings.registry import lowering

_NONE, _MEAN, _SUM = 0, 1, 2


def _wide(array):
    """Half types are computed in float32."""
    return array.astype(compute_dtype(from_numpy(array.dtype)))


def _reduced(loss, reduction, dtype):
    if reduction == _MEAN:
        loss = jnp.mean(loss)
    elif reduction == _SUM:
        loss = jnp.sum(loss)
    return loss.astype(dtype)


def _spread(grad_output, loss_size, reduction):
    """The gradient that reaches each element of the unreduced loss."""
    return grad_output / loss_size if reduction == _MEAN else grad_output


# softmax


@lowering("_softmax", takes_specs=True)
def softmax(self, dim, half_to_float, *, out_specs):
    return _softmax(_wide(self), dim).astype(to_numpy(out_specs[0].dtype))


def _softmax(array, dim):
    if not array.ndim:
        return jnp.ones_like(array)
    if not array.size:
        return array
    axes = (dim % array.ndim,)
    shifted = jnp.exp(array - lax.stop_gradient(leading_axes.maximum(array, axes, keepdims=True)))
    return shifted / leading_axes.total(shifted, axes, keepdims=True)


def _aligned_mask(mask, shape, mask_type):
    """The mask for all of scores (batch, heads, queries, keys): 0 is one of queries and keys, 1 of batch and keys."""
    if mask.shape == shape:
        return mask
    return mask[:, None, None, :] if mask_type == 1 else jnp.broadcast_to(mask, shape)


@lowering("_masked_softmax", static=("mask_type",))
def masked_softmax(self, mask, dim=None, mask_type=None):
    """Without what is masked (True), which gets 0; NaN where all is masked."""
    dim = self.ndim - 1 if dim is None else dim
    mask = _aligned_mask(mask, self.shape, mask_type)
    return _softmax(jnp.where(mask, -jnp.inf, _wide(self)), dim).astype(self.dtype)


@lowering("_masked_softmax_backward")
def masked_softmax_backward(grad_output, output, mask, dim=None):
    dim = output.ndim - 1 if dim is None else dim
    grad, shares = _wide(grad_output), _wide(output)
    total = leading_axes.total(grad * shares, (dim % output.ndim,), keepdims=True)
    return jnp.where(mask, 0, shares * (grad - total)).astype(grad_output.dtype)


@lowering("_log_softmax", takes_specs=True)
def log_softmax(self, dim, half_to_float, *, out_specs):
    array = _wide(self)
    if array.ndim and array.size:
        axes = (dim % array.ndim,)
        array = array - leading_axes.maximum(array, axes, keepdims=True)
        array = array - jnp.log(leading_axes.total(jnp.exp(array), axes, keepdims=True))
    elif not array.ndim:
        array = jnp.zeros_like(array)
    return array.astype(to_numpy(out_specs[0].dtype))


@lowering("_softmax_backward_data")
def softmax_backward_data(grad_output, output, dim, input_dtype):
    weighted = _wide(grad_output) * _wide(output)
    total = leading_axes.total(weighted, (dim % output.ndim,), keepdims=True) if output.ndim else weighted
    return (weighted - _wide(output) * total).astype(to_numpy(input_dtype))


@lowering("_log_softmax_backward_data")
def log_softmax_backward_data(grad_output, output, dim, input_dtype):
    grad = _wide(grad_output)
    total = leading_axes.total(grad, (dim % output.ndim,), keepdims=True) if output.ndim else grad
    return (grad - jnp.exp(_wide(output)) * total).astype(to_numpy(input_dtype))


@lowering("_safe_softmax", takes_specs=True)
def safe_softmax(self, dim, dtype=None, *, out_specs):
    """Softmax that is 0, not NaN, where everything is masked out."""
    array = _wide(self.astype(to_numpy(out_specs[0].dtype)))
    masked = jnp.all(array == -jnp.inf, dim, keepdims=True) if array.ndim else array == -jnp.inf
    return jnp.where(masked, 0, _softmax(array, dim)).astype(to_numpy(out_specs[0].dtype))


# negative log likelihood: classes along dim 1 of `self`, or dim 0 of a single example


def _class_weights(self, target, weight, ignore_index, dim):
    """The weight of each target's class, 0 for those to ignore, and the targets with a valid class in every place."""
    kept = target != ignore_index
    classes = self.shape[dim]
    message = f"Target {{value}} is out of bounds: there are {classes} classes"
    index_in_range(target, classes, IndexError, message, where=kept)
    safe = jnp.where(kept, target, 0)
    weights = jnp.ones((), self.dtype) if weight is None else jnp.take(weight, safe, mode="clip")
    return jnp.where(kept, weights, 0).astype(_wide(self).dtype), safe


def _nll(self, target, weight, reduction, ignore_index, dim):
    weights, safe = _class_weights(self, target, weight, ignore_index, dim)
    picked = jnp.take_along_axis(_wide(self), jnp.expand_dims(safe, dim), axis=dim, mode="clip")
    loss = -jnp.squeeze(picked, dim) * weights
    loss = jnp.where(weights == 0, 0, loss) if weight is None else loss
    total = jnp.sum(weights)
    if reduction == _NONE:
        return loss.astype(self.dtype), jnp.zeros((), self.dtype)
    loss = jnp.sum(loss)
    return (loss / total if reduction == _MEAN else loss).astype(self.dtype), total.astype(self.dtype)


def _nll_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, dim):
    """One comparison for each logit instead of a scatter, which XLA would do element by element."""
    weights, safe = _class_weights(self, target, weight, ignore_index, dim)
    grad = _wide(grad_output)
    grad = grad / _wide(total_weight) if reduction == _MEAN else grad
    chosen = lax.broadcasted_iota(safe.dtype, self.shape, dim) == jnp.expand_dims(safe, dim)
    grads = jnp.expand_dims(jnp.broadcast_to(-grad * weights, safe.shape), dim)
    return jnp.where(chosen & (jnp.expand_dims(weights, dim) != 0), grads, 0).astype(self.dtype)


@lowering("nll_loss_forward")
def nll_loss_forward(self, target, weight, reduction, ignore_index):
    return _nll(self, target.reshape(self.shape[:-1]), weight, reduction, ignore_index, self.ndim - 1)


@lowering("nll_loss_backward")
def nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    target, grad_output = target.reshape(self.shape[:-1]), _match(grad_output, reduction, self.shape[:-1])
    return _nll_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, self.ndim - 1)


def _match(grad_output, reduction, shape):
    return grad_output.reshape(shape) if reduction == _NONE else grad_output.reshape(())


@lowering("nll_loss2d_forward")
def nll_loss2d_forward(self, target, weight, reduction, ignore_index):
    return _nll(self, target, weight, reduction, ignore_index, 1)


@lowering("nll_loss2d_backward")
def nll_loss2d_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    return _nll_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight, 1)


# regression


def _regression(name, loss_of, slope_of, *options):
    """Register `name` and its gradient, from the loss and its slope as functions of the difference."""

    @lowering(name, static=options, takes_specs=True)
    def forward(self, target, reduction=_MEAN, option=1.0, *, out_specs):
        difference = _wide(self) - _wide(target)
        return _reduced(loss_of(difference, option), reduction, to_numpy(out_specs[0].dtype))

    @lowering(f"{name}_backward", static=options, takes_specs=True)
    def backward(grad_output, self, target, reduction, option=1.0, *, out_specs):
        difference = _wide(self) - _wide(target)
        grad = slope_of(difference, option) * _spread(_wide(grad_output), difference.size, reduction)
        return grad.astype(to_numpy(out_specs[0].dtype))


def _huber(difference, delta):
    size = jnp.abs(difference)
    return jnp.where(size <= delta, 0.5 * size * size, delta * (size - 0.5 * delta))


def _smooth_l1(difference, beta):
    size = jnp.abs(difference)
    return size if beta == 0 else jnp.where(size < beta, 0.5 * size * size / beta, size - 0.5 * beta)


def _smooth_l1_slope(difference, beta):
    return jnp.sign(difference) if beta == 0 else jnp.clip(difference / beta, -1, 1)


_regression("mse_loss", lambda difference, _: difference * difference, lambda difference, _: 2 * difference)
_regression("huber_loss", _huber, lambda difference, delta: jnp.clip(difference, -delta, delta), "delta")
_regression("smooth_l1_loss", _smooth_l1, _smooth_l1_slope, "beta")


# binary targets


@lowering("binary_cross_entropy")
def binary_cross_entropy(self, target, weight=None, reduction=_MEAN):
    """Logarithms are cut at -100, as in torch, so that a wrong certainty costs a finite loss."""
    probability, wanted = _wide(self), _wide(target)
    message = "all elements of {} should be between 0 and 1"
    holds((probability >= 0) & (probability <= 1), RuntimeError, message.format("input"))
    holds((wanted >= 0) & (wanted <= 1), RuntimeError, message.format("target"))
    log_true, log_false = (jnp.maximum(log, -100) for log in (jnp.log(probability), jnp.log1p(-probability)))
    loss = (wanted - 1) * log_false - wanted * log_true
    return _reduced(loss if weight is None else loss * weight, reduction, self.dtype)


@lowering("binary_cross_entropy_backward")
def binary_cross_entropy_backward(grad_output, self, target, weight=None, reduction=_MEAN):
    probability = _wide(self)
    grad = _spread(_wide(grad_output), self.size, reduction)
    grad = grad * (probability - target) / jnp.maximum((1 - probability) * probability, 1e-12)
    return (grad if weight is None else grad * weight).astype(self.dtype)


@lowering("binary_cross_entropy_with_logits", takes_specs=True)
def binary_cross_entropy_with_logits(self, target, weight=None, pos_weight=None, reduction=_MEAN, *, out_specs):
    logits, wanted = _wide(self), _wide(target)
    negative = jax.nn.softplus(-logits)
    scale = 1 if pos_weight is None else 1 + (pos_weight - 1) * wanted
    loss = (1 - wanted) * logits + scale * negative
    return _reduced(loss if weight is None else loss * weight, reduction, to_numpy(out_specs[0].dtype))


@lowering("soft_margin_loss")
def soft_margin_loss(self, target, reduction=_MEAN):
    return _reduced(jax.nn.softplus(-_wide(target) * _wide(self)), reduction, self.dtype)


@lowering("soft_margin_loss_backward")
def soft_margin_loss_backward(grad_output, self, target, reduction):
    slope = -target * jax.nn.sigmoid(-_wide(target) * _wide(self))
    return (slope * _spread(_wide(grad_output), self.size, reduction)).astype(self.dtype)


@lowering("log_sigmoid_forward")
def log_sigmoid_forward(self):
    """`buffer` is of use to torch's CPU kernels only."""
    return jax.nn.log_sigmoid(_wide(self)).astype(self.dtype), jnp.zeros_like(self)


@lowering("log_sigmoid_backward")
def log_sigmoid_backward(grad_output, self, buffer):
    return (_wide(grad_output) * jax.nn.sigmoid(-_wide(self))).astype(self.dtype)


# margins


@lowering("multi_margin_loss", static=("p",))
def multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=_MEAN):
    scores = jnp.atleast_2d(self)
    message = f"target out of range: {{value}} with {scores.shape[1]} classes"
    index_in_range(target, scores.shape[1], RuntimeError, message)
    loss = jnp.mean(_margins(scores, target, p, margin, weight), -1)
    return _reduced(loss, reduction, self.dtype)


@lowering("multi_margin_loss_backward", static=("p",))
def multi_margin_loss_backward(grad_output, self, target, p, margin, weight=None, reduction=_MEAN):
    """An element pushes its own score down and the target's up by as much."""
    scores, wanted = _wide(jnp.atleast_2d(self)), target.reshape(-1, 1)
    rows, classes = scores.shape
    own = jnp.take_along_axis(scores, wanted, axis=1, mode="clip")
    violation = jnp.asarray(margin).astype(scores.dtype) - own + scores
    slope = jnp.where(violation > 0, 2 * violation if p == 2 else 1, 0) / classes
    slope = slope if weight is None else slope * jnp.take(weight, wanted, mode="clip")
    is_target = jnp.arange(classes) == wanted
    slope = jnp.where(is_target, 0, slope)
    slope = jnp.where(is_target, -jnp.sum(slope, 1, keepdims=True), slope)
    grad = _spread(_wide(grad_output), rows, reduction).reshape(-1, 1)
    return (slope * grad).reshape(self.shape).astype(self.dtype)


def _margins(scores, target, p, margin, weight):
    wanted = target.reshape(-1, 1)
    own = jnp.take_along_axis(scores, wanted, axis=1, mode="clip")
    violation = jnp.maximum(jnp.asarray(margin).astype(scores.dtype) - own + scores, 0) ** p
    violation = violation if weight is None else violation * jnp.take(weight, wanted, mode="clip")
    return jnp.where(jnp.arange(scores.shape[1]) == wanted, 0, violation)


def _labels(self, target):
    """Scores and targets as matrices, which targets count (those before the first -1), and what they mark."""
    scores, target = _wide(jnp.atleast_2d(self)), jnp.atleast_2d(target)
    counted = jnp.cumsum(target < 0, 1) == 0
    places = jnp.where(counted, target, scores.shape[1])
    marked = jnp.zeros(scores.shape, jnp.bool_).at[jnp.arange(scores.shape[0])[:, None], places].set(True, mode="drop")
    return scores, jnp.where(counted, target, 0), counted, marked


def _label_violations(scores, target, counted, marked):
    """Rows by targets by other classes: how far each other class comes too close to a target."""
    own = jnp.take_along_axis(scores, target, axis=1)
    violation = 1 - own[:, :, None] + scores[:, None, :]
    return jnp.where(counted[:, :, None] & ~marked[:, None, :], jnp.maximum(violation, 0), 0)


@lowering("multilabel_margin_loss_forward")
def multilabel_margin_loss_forward(self, target, reduction):
    classes = self.shape[-1] if self.ndim else 1
    in_range = (target >= -1) & (target < classes)  # -1 ends the labels of a row
    holds(in_range, RuntimeError, f"argument #2 'target' is out of range: it must be from -1 to {classes - 1}")
    scores, target_of, counted, marked = _labels(self, target)
    loss = jnp.sum(_label_violations(scores, target_of, counted, marked), (1, 2)) / max(scores.shape[1], 1)
    return _reduced(loss, reduction, self.dtype), marked.reshape(target.shape).astype(self.dtype)


@lowering("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target):
    scores, target, counted, marked = _labels(self, target)
    pushed = (_label_violations(scores, target, counted, marked) > 0).astype(scores.dtype)
    rows = jnp.arange(scores.shape[0])[:, None]
    slope = jnp.sum(pushed, 1).at[rows, target].add(-jnp.sum(pushed, 2)) / max(scores.shape[1], 1)
    grad = _spread(_wide(grad_output), scores.shape[0], reduction).reshape(-1, 1)
    return (slope * grad).reshape(self.shape).astype(self.dtype)
