"""Losses: by name, as functions or modules, and the one that is chosen when none is given.

Whatever is chosen, is chosen by types, shapes and dtypes; no value is read.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xlatrainer.metrics.accuracy import is_class_index

__all__ = ["LOSSES", "LossFunction", "LossSpec", "binary_threshold", "default_loss", "predictions_of", "resolve_loss"]

LossFunction = Callable[[Any, Any], Tensor]
LossSpec = str | nn.Module | LossFunction | None


def _same_shape(function: Callable[..., Tensor]) -> LossFunction:
    """`function`, but unequal shapes are an error: PyTorch would broadcast (N, 1) with (N,) to (N, N)."""

    def checked(prediction: Tensor, target: Tensor) -> Tensor:
        if prediction.shape != target.shape:
            raise ValueError(
                f"the loss {function.__name__} needs predictions and targets of the same shape, got "
                f"{tuple(prediction.shape)} and {tuple(target.shape)}"
            )
        return function(prediction, target)

    return checked


def _cross_entropy(prediction: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(prediction, target if target.is_floating_point() else target.long())


_mse = _same_shape(F.mse_loss)
_mae = _same_shape(F.l1_loss)
_bce = _same_shape(F.binary_cross_entropy)
_bce_with_logits = _same_shape(F.binary_cross_entropy_with_logits)

LOSSES: dict[str, LossFunction] = {
    "cross_entropy": _cross_entropy,
    "nll": F.nll_loss,
    "mse": _mse,
    "mae": _mae,
    "huber": _same_shape(F.huber_loss),
    "smooth_l1": _same_shape(F.smooth_l1_loss),
    "bce": _bce,
    "bce_with_logits": _bce_with_logits,
}


def resolve_loss(loss: LossSpec) -> LossFunction:
    """The function of a model's output and the targets that `loss` stands for.

    Args:
        loss: A name of `LOSSES`, a module or function (prediction, target) -> tensor of shape (), or None for
            `default_loss`.

    Raises:
        ValueError: For an unknown name, and for a module with parameters (no optimizer would train them).
        TypeError: For anything else.
    """
    if loss is None:
        return default_loss
    if isinstance(loss, str):
        if loss.lower() not in LOSSES:
            raise ValueError(f"unknown loss {loss!r}; the names are {sorted(LOSSES)}")
        return _of_predictions(LOSSES[loss.lower()])
    if isinstance(loss, type):
        raise TypeError(f"loss must be an object, not a class: create one, {loss.__name__}()")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ValueError(
            f"the loss {type(loss).__name__} has parameters, which the optimizer would not train; make it a part of "
            f"the model, whose output may have a .loss"
        )
    if callable(loss):
        return _of_predictions(loss)
    raise TypeError(f"loss must be one of {sorted(LOSSES)}, a function, a module or None; got {loss!r}")


def default_loss(output: Any, target: Any) -> Tensor:
    """The loss when none is given.

    The output's own `.loss` if it has one; cross-entropy for scores (N, C, ...) and integer targets (N, ...); the mean
    squared error for float targets of the predictions' shape.

    Raises:
        ValueError: For everything else.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    prediction = predictions_of(output)
    if isinstance(prediction, Tensor) and isinstance(target, Tensor):
        if is_class_index(prediction, target):
            return _cross_entropy(prediction, target)
        if prediction.is_floating_point() and target.is_floating_point() and prediction.shape == target.shape:
            return _mse(prediction, target)
    raise ValueError(
        f"no loss was given and none fits: the model returned {_describe(prediction)}, the targets are "
        f"{_describe(target)}. Chosen by itself: an output with .loss; cross-entropy for float scores (N, C, ...), "
        f"C > 1, with integer targets (N, ...); mean squared error for float targets of the same shape. Otherwise pass "
        f"Trainer(loss=...): one of {sorted(LOSSES)}, a function, or a module"
    )


def predictions_of(output: Any) -> Any:
    """What losses and metrics compare with the targets: the output's `.logits` if it has them, else the output."""
    return getattr(output, "logits", output)


def binary_threshold(loss: LossSpec) -> float | None:
    """Above which value a single score means class 1 under this loss: 0.0 for logits, 0.5 for probabilities."""
    if isinstance(loss, str):
        loss = LOSSES.get(loss.lower())
    if isinstance(loss, nn.BCEWithLogitsLoss) or loss in (_bce_with_logits, F.binary_cross_entropy_with_logits):
        return 0.0
    if isinstance(loss, nn.BCELoss) or loss in (_bce, F.binary_cross_entropy):
        return 0.5
    return None


def _of_predictions(loss: LossFunction) -> LossFunction:
    return lambda output, target: loss(predictions_of(output), target)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return "none" if value is None else f"a {type(value).__name__}"


def checked_loss(loss: Any) -> Tensor:
    """`loss` if it can be differentiated: a float tensor of shape ().

    Raises:
        TypeError: If it is no tensor, or no float.
        ValueError: If it has another shape.
    """
    if not isinstance(loss, Tensor) or not torch.is_floating_point(loss):
        raise TypeError(f"the loss must be a float tensor of shape (), got {_describe(loss)}")
    if loss.dim() > 0:
        raise ValueError(f"the loss must have shape (), got {tuple(loss.shape)}; use reduction='mean', or loss.mean()")
    return loss
