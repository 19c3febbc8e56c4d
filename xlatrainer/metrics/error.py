"""Errors of a regression, one value an element or a row; `MeanMetric` makes metrics of them."""

import torch
from torch import Tensor

from xlatrainer.metrics.mean import MeanMetric

__all__ = ["RootMeanSquaredError", "absolute_error", "cosine_similarity", "squared_error"]


def absolute_error(prediction: Tensor, target: Tensor) -> Tensor:
    """|prediction - target|, of equal shapes."""
    return _difference(prediction, target).abs()


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """(prediction - target)², of equal shapes."""
    return _difference(prediction, target).square()


def cosine_similarity(prediction: Tensor, target: Tensor) -> Tensor:
    """The cosine of the angle between the vectors in the last dimension: (N, ..., D) gives (N, ...).

    Raises:
        ValueError: For unequal shapes, and for fewer than two dimensions.
    """
    if prediction.shape != target.shape or prediction.dim() < 2:
        raise ValueError(
            f"cosine_similarity needs predictions and targets (N, ..., D) of the same shape, got "
            f"{tuple(prediction.shape)} and {tuple(target.shape)}"
        )
    return torch.nn.functional.cosine_similarity(prediction, target, dim=-1)


class RootMeanSquaredError(MeanMetric):
    """The root of the mean of squared errors over all values of all batches (not the mean of the batches' roots).

    Args:
        name: Its name in the logs; default "rmse".

    Example:
        >>> rmse = RootMeanSquaredError()
        >>> rmse.update(torch.tensor([3.0]), torch.tensor([0.0]))
        >>> rmse.update(torch.tensor([4.0]), torch.tensor([0.0]))
        >>> rmse.compute()  # the root of 12.5
        tensor(3.5355)
    """

    def __init__(self, name: str = "rmse") -> None:
        super().__init__(squared_error, name)

    def compute(self) -> Tensor:
        return super().compute().sqrt()


def _difference(prediction: Tensor, target: Tensor) -> Tensor:
    if prediction.shape != target.shape:
        raise ValueError(
            f"predictions {tuple(prediction.shape)} and targets {tuple(target.shape)} must have the same shape: "
            f"broadcasting would compare each with every other"
        )
    return prediction - target
