"""Means over examples: `Mean` of numbers, and `MeanMetric` of a function of predictions and targets.

Both keep a sum and the number, or the weight, of what was summed, so that a short last batch counts for what it holds.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from xlatrainer.metrics.metric import Metric
from xlatrainer.metrics.weights import weighted_sum

__all__ = ["Mean", "MeanMetric"]


class Mean(Metric):
    """A weighted mean of numbers.

    Args:
        name: Its name in the logs.
        dtype: Of the sum; default float32, int64 counts exactly.

    Example:
        >>> mean = Mean("loss")
        >>> mean.update(torch.tensor(1.0), weight=3)
        >>> mean.update(torch.tensor(5.0), weight=1)
        >>> mean.compute()
        tensor(2.)
    """

    total: Tensor
    weight: Tensor

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(name)
        self.add_state("total", torch.zeros((), dtype=dtype))
        self.add_state("weight", torch.zeros((), dtype=torch.int64))

    def set_weighted(self) -> Self:
        super().set_weighted()
        for name in ("total", "weight"):
            self.add_state(name, torch.zeros((), dtype=torch.float32))
        return self

    def update(self, value: Tensor, weight: int | Tensor = 1) -> None:
        """Take in `value`, shape (), for `weight` examples: a number, or an integer tensor of shape ()."""
        self._add(value.detach().to(self.total.dtype) * weight, weight)

    def compute(self) -> Tensor:
        """The mean, shape (), float32; NaN before the first `update`."""
        return self.total / self.weight

    def _add(self, total: Tensor, weight: int | Tensor) -> None:
        self.total = self.total + total
        self.weight = self.weight + weight


class MeanMetric(Mean):
    """The mean of a function of predictions and targets.

    Args:
        function: (prediction, target) -> tensor. A tensor of shape () is taken for the mean of a batch and counts once
            for each of its examples; a tensor with more values counts each of them (one an example, or an element).
            Only the latter can be weighed, or leave out rows that pad a batch.
        name: Its name in the logs; default None, the name of the function.

    Example:
        >>> metric = MeanMetric(lambda prediction, target: (prediction - target).abs(), "mae")
        >>> metric.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
        >>> metric.update(torch.tensor([7.0]), torch.tensor([2.0]))
        >>> metric.compute()
        tensor(2.)
    """

    def __init__(self, function: Callable[[Any, Any], Tensor], name: str | None = None) -> None:
        super().__init__(name or _name_of(function))
        self._function = function

    def update(  # type: ignore[override]
        self, prediction: Any, target: Any, sample_weight: Tensor | None = None
    ) -> None:
        value = self._function(prediction, target)
        if not isinstance(value, Tensor):
            raise TypeError(f"the metric {self.name!r} must return a tensor, got {type(value).__name__}")
        value = value.detach().to(self.total.dtype)
        if value.dim() > 0:
            self._add(*weighted_sum(value, sample_weight))
        elif sample_weight is None:
            rows = _num_rows(target, prediction)
            self._add(value * rows, rows)
        else:
            raise ValueError(
                f"the metric {self.name!r} returns one number for a whole batch, in which rows cannot be weighed or "
                f"left out; let it return one value for each example, shape (rows,)"
            )


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if name == "<lambda>":
        raise ValueError("a lambda has no name to log it by; pass MeanMetric(function, name=...)")
    return str(name)


def _num_rows(*candidates: Any) -> int:
    for candidate in candidates:
        if isinstance(candidate, Tensor) and candidate.dim() > 0:
            return candidate.shape[0]
    return 1
