"""Fused optimizer steps (`fused=True`): one node for all parameters, and what a gradient scaler does.

`grad_scale` and `found_inf` come from a scaler: gradients are divided by the one, and with the other set nothing
changes. Gradients are among the results, since torch writes the unscaled ones back.
"""

import jax.numpy as jnp

from xlatrainer.backend.dtypes import compute_dtype, from_numpy
from xlatrainer.backend.lowerings.registry import lowering


def _wide(array):
    return array.astype(compute_dtype(from_numpy(array.dtype)))


def _unscaled(grads, grad_scale):
    return grads if grad_scale is None else [(_wide(grad) / grad_scale).astype(grad.dtype) for grad in grads]


def _kept_if(found_inf, old, new):
    """The new arrays in the dtypes of the old ones, or the old ones after an overflow."""
    new = [after.astype(before.dtype) for before, after in zip(old, new, strict=True)]
    if found_inf is None:
        return new
    return [jnp.where(found_inf.reshape(()) == 1, before, after) for before, after in zip(old, new, strict=True)]


def _adam(decoupled):
    """Adam, or AdamW where the decay of weights is `decoupled` from the gradient.

    Source: torch.optim.Adam and torch.optim.AdamW in torch's reference.
    """

    def step_of(param, grad, mean, square, largest, step, lr, beta1, beta2, weight_decay, eps):
        param, grad, mean, square = map(_wide, (param, grad, mean, square))
        if decoupled:
            param = param * (1 - lr * weight_decay)
        else:
            grad = grad + weight_decay * param
        mean = mean + (1 - beta1) * (grad - mean)
        square = beta2 * square + (1 - beta2) * grad * grad
        largest = square if largest is None else jnp.maximum(_wide(largest), square)
        correction = jnp.sqrt(1 - beta2**step)
        param = param - lr / (1 - beta1**step) * mean / (jnp.sqrt(largest) / correction + eps)
        return param, mean, square, largest

    def fused(
        self,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        *,
        lr,
        beta1,
        beta2,
        weight_decay,
        eps,
        amsgrad,
        maximize,
        grad_scale=None,
        found_inf=None,
    ):
        unscaled = _unscaled(grads, grad_scale)
        largest = max_exp_avg_sqs if amsgrad else [None] * len(self)
        results = [
            step_of(param, -grad if maximize else grad, *state, lr, beta1, beta2, weight_decay, eps)
            for param, grad, *state in zip(self, unscaled, exp_avgs, exp_avg_sqs, largest, state_steps, strict=True)
        ]
        params, means, squares, maxima = map(list, zip(*results, strict=True))
        kept = [(self, params), (grads, unscaled), (exp_avgs, means), (exp_avg_sqs, squares)]
        kept.append((max_exp_avg_sqs, maxima if amsgrad else max_exp_avg_sqs))
        return tuple(_kept_if(found_inf, old, new) for old, new in kept)

    return fused


lowering("_fused_adam", "_fused_adam.tensor_lr")(_adam(decoupled=False))
lowering("_fused_adamw", "_fused_adamw.tensor_lr")(_adam(decoupled=True))


@lowering("_fused_sgd", "_fused_sgd.tensor_lr")
def fused_sgd(
    self,
    grads,
    momentum_buffer_list,
    *,
    weight_decay,
    momentum,
    lr,
    dampening,
    nesterov,
    maximize,
    is_first_step,
    grad_scale=None,
    found_inf=None,
):
    """Without momentum there are no buffers; in the first step they hold nothing yet."""
    unscaled = _unscaled(grads, grad_scale)
    params, buffers = [], []
    for index, (param, grad) in enumerate(zip(self, unscaled, strict=True)):
        param, grad = _wide(param), _wide(-grad if maximize else grad)
        grad = grad + weight_decay * param
        if momentum_buffer_list:
            buffer = momentum_buffer_list[index]
            buffer = grad if is_first_step else momentum * _wide(buffer) + (1 - dampening) * grad
            buffers.append(buffer)
            grad = grad + momentum * buffer if nesterov else buffer
        params.append(param - lr * grad)
    kept = [(self, params), (grads, unscaled), (momentum_buffer_list, buffers)]
    return tuple(_kept_if(found_inf, old, new) for old, new in kept)


@lowering("_fused_adagrad")
def fused_adagrad(
    self,
    grads,
    state_sums,
    state_steps,
    *,
    lr,
    lr_decay,
    weight_decay,
    eps,
    maximize,
    grad_scale=None,
    found_inf=None,
):
    unscaled = _unscaled(grads, grad_scale)
    params, sums = [], []
    for param, grad, total, step in zip(self, unscaled, state_sums, state_steps, strict=True):
        grad = _wide(-grad if maximize else grad) + weight_decay * _wide(param)
        total = _wide(total) + grad * grad
        params.append(_wide(param) - lr / (1 + (step - 1) * lr_decay) * grad / (jnp.sqrt(total) + eps))
        sums.append(total)
    kept = [(self, params), (grads, unscaled), (state_sums, sums), (state_steps, state_steps)]
    return tuple(_kept_if(found_inf, old, new) for old, new in kept)


@lowering("_amp_foreach_non_finite_check_and_unscale")
def amp_foreach_non_finite_check_and_unscale(self, found_inf, inv_scale):
    finite = [jnp.all(jnp.isfinite(grad)) for grad in self]
    overflow = ~jnp.all(jnp.stack(finite)) if finite else jnp.zeros((), bool)
    unscaled = [(_wide(grad) * inv_scale.reshape(())).astype(grad.dtype) for grad in self]
    return [*unscaled, jnp.where(overflow, 1, found_inf).astype(found_inf.dtype)]


@lowering("_amp_update_scale")
def amp_update_scale(self, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval):
    """Shrink the scale after an overflow, let it grow after `growth_interval` steps without one."""
    overflow = found_inf.reshape(self.shape) != 0
    steps = growth_tracker + 1
    due = steps == growth_interval
    grown = self * scale_growth_factor
    grown = jnp.where(due & jnp.isfinite(grown), grown, self)
    scale = jnp.where(overflow, self * scale_backoff_factor, grown).astype(self.dtype)
    return scale, jnp.where(overflow | due, 0, steps).astype(growth_tracker.dtype)
