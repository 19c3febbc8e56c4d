"""Errors of a regression, one value an element; `MeanMetric` makes metrics of them."""

from torch import Tensor

__all__ = ["absolute_error", "squared_error"]


def absolute_error(prediction: Tensor, target: Tensor) -> Tensor:
    """|prediction - target|, of equal shapes."""
    return _difference(prediction, target).abs()


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """(prediction - target)², of equal shapes."""
    return _difference(prediction, target).square()


def _difference(prediction: Tensor, target: Tensor) -> Tensor:
    if prediction.shape != target.shape:
        raise ValueError(
            f"predictions {tuple(prediction.shape)} and targets {tuple(target.shape)} must have the same shape: "
            f"broadcasting would compare each with every other"
        )
    return prediction - target
