"""Losses in which rows count by weights, or not at all: sample weights, and the rows that only pad a short batch.

A weighted loss is the sum of the weighted elements over their number, as in Keras: not over the sum of the weights.
Rows that pad are in neither. Elements that torch's own mean does not count (`ignore_index`), or counts by their class
(`weight`), are counted here as there, so that weights of 1 change nothing.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EVEN", "Elements", "RowWeights", "elements_of", "weighted_mean"]

_IGNORED = -100  # torch's default of ignore_index


@dataclass(frozen=True)
class RowWeights:
    """How the rows of a batch count.

    Attributes:
        sample: Float or bool, shape (rows,) or one that the targets' begins with; None for all alike.
        is_real: Bool, shape (rows,): False for rows that pad the batch; None if there are none.
    """

    sample: Tensor | None = None
    is_real: Tensor | None = None


EVEN = RowWeights()


@dataclass(frozen=True)
class Elements:
    """A loss before its reduction.

    Attributes:
        values: Shape (rows, ...).
        counts: How much each counts in the mean; None for 1.
        reduction: "mean", "sum", or "batchmean", which divides by the rows.
    """

    values: Tensor
    counts: Tensor | None = None
    reduction: str = "mean"


def elements_of(loss: Callable[..., Tensor], prediction: Any, target: Any) -> Elements:
    """The elements of `loss`: a module with a `reduction`, a function with such a parameter, or one of values by row.

    Raises:
        ValueError: For a loss that has a mean and no elements.
    """
    if isinstance(loss, nn.Module) and isinstance(getattr(loss, "reduction", None), str):
        plain = copy.copy(loss)
        plain.reduction = "none"  # type: ignore[assignment]
        values = plain(prediction, target)
        counts = None
        if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
            counts = _class_counts(target, loss.ignore_index, loss.weight)
        return Elements(values, counts, str(loss.reduction))
    if not isinstance(loss, nn.Module) and "reduction" in inspect.signature(loss).parameters:
        values = loss(prediction, target, reduction="none")
        is_by_class = isinstance(target, Tensor) and not target.is_floating_point() and values.shape == target.shape
        return Elements(values, _class_counts(target, _IGNORED, None) if is_by_class else None)
    values = loss(prediction, target)
    if values.dim() == 0:
        raise ValueError(
            "rows cannot be weighed in this loss, which returns their mean: neither sample and class weights nor "
            "pad_last_batch go with it. Give the function a parameter reduction='mean' that also takes 'none', or "
            "return a value for each row"
        )
    return Elements(values)


def _class_counts(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor | None:
    if target.is_floating_point():
        return None
    counted = target != ignore_index
    if weight is None:
        return counted.float()
    return weight[torch.where(counted, target, 0).long()] * counted


def weighted_mean(elements: Elements, weights: RowWeights) -> Tensor:
    """The loss of these elements, shape ().

    Raises:
        ValueError: If the shapes do not go together.
    """
    values, counts = elements.values, elements.counts
    if weights.sample is not None:
        values = values * _over(weights.sample, values).to(values.dtype)
    if weights.is_real is not None:
        values = torch.where(_over(weights.is_real, values), values, 0)
    total = values.sum()
    if elements.reduction == "sum":
        return total
    if elements.reduction == "batchmean":
        return total / (values.shape[0] if weights.is_real is None else weights.is_real.sum())
    if counts is None:
        if weights.is_real is None:
            return total / values.numel()
        return total / (weights.is_real.sum() * (values.numel() // values.shape[0]))
    if weights.is_real is not None:
        counts = torch.where(_over(weights.is_real, counts), counts, 0)
    return total / counts.sum()


def _over(rows: Tensor, values: Tensor) -> Tensor:
    """`rows` with as many dimensions as `values`, to multiply them with."""
    if values.shape[: rows.dim()] != rows.shape:
        raise ValueError(
            f"weights of shape {tuple(rows.shape)} do not go with a loss of shape {tuple(values.shape)}: there must be "
            f"one for each row, or for each of the first dimensions"
        )
    return rows.reshape(rows.shape + (1,) * (values.dim() - rows.dim()))
