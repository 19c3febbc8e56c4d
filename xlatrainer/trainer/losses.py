"""Losses: by name, as functions or modules, and the one that is chosen when none is given.

Whatever is chosen, is chosen by types, shapes and dtypes; no value is read. How rows are weighed is in `weighting`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xlatrainer.metrics.accuracy import is_class_index
from xlatrainer.trainer.precision import full_precision
from xlatrainer.trainer.weighting import EVEN, RowWeights, elements_of, weighted_mean

__all__ = [
    "LOSSES",
    "LossFunction",
    "LossSpec",
    "binary_threshold",
    "checked_loss",
    "default_loss",
    "predictions_of",
    "resolve_loss",
]

LossFunction = Callable[..., Tensor]
"""(output, target, weights=EVEN) -> tensor of shape ()."""

OneLoss = str | nn.Module | Callable[[Any, Any], Tensor]
LossSpec = OneLoss | Mapping[str, OneLoss] | Sequence[OneLoss] | None


def _same_shape(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, but unequal shapes are an error: PyTorch would broadcast (N, 1) with (N,) to (N, N)."""

    def checked(prediction: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        if prediction.shape != target.shape:
            raise ValueError(
                f"the loss {function.__name__} needs predictions and targets of the same shape, got "
                f"{tuple(prediction.shape)} and {tuple(target.shape)}"
            )
        return function(prediction, target, reduction=reduction)

    checked.__name__ = function.__name__
    return checked


def _cross_entropy(prediction: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(prediction, target if target.is_floating_point() else target.long(), reduction=reduction)


def _nll(prediction: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.nll_loss(prediction, target, reduction=reduction)


_mse = _same_shape(F.mse_loss)
_mae = _same_shape(F.l1_loss)
_bce = _same_shape(F.binary_cross_entropy)
_bce_with_logits = _same_shape(F.binary_cross_entropy_with_logits)

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": _cross_entropy,
    "nll": _nll,
    "mse": _mse,
    "mae": _mae,
    "huber": _same_shape(F.huber_loss),
    "smooth_l1": _same_shape(F.smooth_l1_loss),
    "bce": _bce,
    "bce_with_logits": _bce_with_logits,
}


def resolve_loss(loss: LossSpec, loss_weights: Mapping[str, float] | Sequence[float] | None = None) -> LossFunction:
    """The function of a model's output, the targets and `RowWeights` that `loss` stands for.

    Args:
        loss: A name of `LOSSES`, a module or function (prediction, target) -> tensor of shape (), a dict or list of
            such for the outputs of a model that returns a dict or a tuple, or None for `default_loss`.
        loss_weights: For a dict or list of losses: how much each counts in their sum; default 1.

    Raises:
        ValueError: For an unknown name, for a module with parameters (no optimizer would train them), and for weights
            that do not go with the losses.
        TypeError: For anything else.
    """
    if isinstance(loss, Mapping | list | tuple):
        return SeveralLosses(loss, loss_weights)
    if loss_weights is not None:
        raise ValueError("loss_weights is for a dict or list of losses, one for each output of the model")
    if loss is None:
        return default_loss
    if isinstance(loss, str):
        if loss.lower() not in LOSSES:
            raise ValueError(f"unknown loss {loss!r}; the names are {sorted(LOSSES)}")
        return partial(_of_predictions, LOSSES[loss.lower()])
    if isinstance(loss, type):
        raise TypeError(f"loss must be an object, not a class: create one, {loss.__name__}()")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ValueError(
            f"the loss {type(loss).__name__} has parameters, which the optimizer would not train; make it a part of "
            f"the model, whose output may have a .loss"
        )
    if callable(loss):
        return partial(_of_predictions, loss)
    raise TypeError(
        f"loss must be one of {sorted(LOSSES)}, a function, a module, a dict or list of these, or None; got {loss!r}"
    )


class SeveralLosses:
    """A loss for each output: their weighted sum.

    Args:
        losses: By the keys of the model's output and of the targets, or by position.
        loss_weights: See `resolve_loss`.

    Attributes:
        names: What the losses are logged as: "NAME_loss", or "output_0_loss" and so on.
    """

    def __init__(
        self, losses: Mapping[str, Any] | Sequence[Any], loss_weights: Mapping[str, float] | Sequence[float] | None
    ) -> None:
        by_name = isinstance(losses, Mapping)
        items: dict[Any, Any] = dict(losses) if isinstance(losses, Mapping) else dict(enumerate(losses))
        weights: dict[Any, float] = {}
        if loss_weights is not None:
            weights = dict(loss_weights) if isinstance(loss_weights, Mapping) else dict(enumerate(loss_weights))
        if not items or not set(weights) <= set(items) or by_name != isinstance(loss_weights or losses, Mapping):
            raise ValueError(
                f"loss and loss_weights must both be dicts with the same names, or both lists of the same length; got "
                f"losses for {list(items)} and weights for {list(weights)}"
            )
        self._parts = {key: resolve_loss(loss) for key, loss in items.items()}
        self._weights = {key: float(weights.get(key, 1.0)) for key in items}
        self.names = {key: f"{key}_loss" if by_name else f"output_{key}_loss" for key in items}

    def __call__(self, output: Any, target: Any, weights: RowWeights = EVEN) -> Tensor:
        return self.total(self.parts(output, target, weights))

    def parts(self, output: Any, target: Any, weights: RowWeights = EVEN) -> dict[Any, Tensor]:
        """Each loss on its own."""
        losses = {}
        for key, loss in self._parts.items():
            try:
                pair = output[key], target[key]
            except (KeyError, IndexError, TypeError):
                raise ValueError(
                    f"there is a loss for {key!r}, so the model's output and the targets must both have it; the "
                    f"output is {_describe(output)}, the targets are {_describe(target)}"
                ) from None
            losses[key] = checked_loss(loss(*pair, weights))
        return losses

    def total(self, parts: Mapping[Any, Tensor]) -> Tensor:
        """The weighted sum."""
        return torch.stack([self._weights[key] * loss for key, loss in parts.items()]).sum()


def default_loss(output: Any, target: Any, weights: RowWeights = EVEN) -> Tensor:
    """The loss when none is given.

    The output's own `.loss` if it has one; cross-entropy for scores (N, C, ...) and integer targets (N, ...); the mean
    squared error for float targets of the predictions' shape.

    Raises:
        ValueError: For everything else.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        if weights is not EVEN:
            raise ValueError(
                "the model computes its loss itself, so rows cannot be weighed: neither sample and class weights nor "
                "pad_last_batch go with it. Pass Trainer(loss=...) to compute it from the model's .logits"
            )
        return own
    prediction = predictions_of(output)
    if isinstance(prediction, Tensor) and isinstance(target, Tensor):
        if is_class_index(prediction, target):
            return _of_predictions(_cross_entropy, prediction, target, weights)
        if prediction.is_floating_point() and target.is_floating_point() and prediction.shape == target.shape:
            return _of_predictions(_mse, prediction, target, weights)
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
    if isinstance(loss, Mapping | list | tuple):
        return None
    if isinstance(loss, str):
        loss = LOSSES.get(loss.lower())
    if isinstance(loss, nn.BCEWithLogitsLoss) or loss in (_bce_with_logits, F.binary_cross_entropy_with_logits):
        return 0.0
    if isinstance(loss, nn.BCELoss) or loss in (_bce, F.binary_cross_entropy):
        return 0.5
    return None


def _of_predictions(loss: Callable[..., Tensor], output: Any, target: Any, weights: RowWeights = EVEN) -> Tensor:
    prediction = full_precision(predictions_of(output))
    if target is None and (loss in LOSSES.values() or type(loss).__module__ == nn.MSELoss.__module__):
        name = getattr(loss, "__name__", type(loss).__name__).strip("_")
        raise ValueError(
            f"the loss {name!r} needs targets and the batch has none: pass y, or batches (inputs, targets)"
        )
    if weights is EVEN:
        return loss(prediction, target)
    return weighted_mean(elements_of(loss, prediction, target), weights)


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
