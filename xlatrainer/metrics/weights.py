"""Sums in which rows count by their weights."""

import torch
from torch import Tensor

__all__ = ["full_weight", "weighted_sum"]


def weighted_sum(values: Tensor, sample_weight: Tensor | None) -> tuple[Tensor, Tensor | int]:
    """The sum of `values` times their weights, and the sum of the weights.

    Args:
        values: One a row, or more: shape (rows, ...).
        sample_weight: Of a shape that that of `values` begins with; None weighs all values alike. A bool one counts
            those where it is True, exactly. What has weight 0 may be anything, NaN too.

    Returns:
        The sum, shape (), and the weight: a tensor of shape (), or the number of values for None.

    Example:
        >>> weighted_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([True, True, False]))
        (tensor(3.), tensor(2))
        >>> weighted_sum(torch.tensor([1.0, 2.0]), None)
        (tensor(3.), 2)
    """
    if sample_weight is None:
        return values.sum(), values.numel()
    weight = full_weight(sample_weight, values)
    return torch.where(weight != 0, values * weight, 0).sum(), weight.sum()


def full_weight(sample_weight: Tensor, values: Tensor) -> Tensor:
    """`sample_weight` with the shape of `values`: int64 for a bool one, else as it is.

    Raises:
        ValueError: If the shapes do not go together.
    """
    if values.shape[: sample_weight.dim()] != sample_weight.shape:
        raise ValueError(
            f"sample weights of shape {tuple(sample_weight.shape)} do not go with values of shape "
            f"{tuple(values.shape)}: there must be one for each row, or for each of the first dimensions"
        )
    weight = sample_weight.long() if sample_weight.dtype == torch.bool else sample_weight
    return weight.reshape(weight.shape + (1,) * (values.dim() - weight.dim())).expand(values.shape)
