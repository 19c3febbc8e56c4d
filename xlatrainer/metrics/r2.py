"""`R2`: the coefficient of determination, gathered without losing digits to large means."""

import torch
from torch import Tensor

from xlatrainer.metrics.metric import Metric
from xlatrainer.metrics.weights import full_weight

__all__ = ["R2"]


class R2(Metric):
    """One minus the squared errors divided by the squared distances of the targets from their mean.

    Of several outputs the mean of their figures. The mean of the targets and the squared distances from it are updated
    batch by batch (Chan's formula), so that float32 keeps its digits where sums of squares would lose them.

    Args:
        num_outputs: Columns of the predictions, which then are (N, num_outputs). Default 1: (N,) or (N, 1).
        name: Its name in the logs; default "r2".

    Example:
        >>> r2 = R2()
        >>> r2.update(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))
        >>> r2.compute()
        tensor(0.5000)
    """

    weight: Tensor
    mean: Tensor
    spread: Tensor
    error: Tensor

    def __init__(self, num_outputs: int = 1, name: str = "r2") -> None:
        super().__init__(name)
        self._num_outputs = num_outputs
        for state in ("weight", "mean", "spread", "error"):
            self.add_state(state, torch.zeros(num_outputs))

    def update(self, prediction: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> None:
        if prediction.shape != target.shape or prediction.shape[1:].numel() != self._num_outputs:
            raise ValueError(
                f"{self.name} needs predictions and targets of the same shape with {self._num_outputs} value(s) a row, "
                f"got {tuple(prediction.shape)} and {tuple(target.shape)}; R2(num_outputs=...) takes more, shape "
                f"(N, num_outputs)"
            )
        rows = (target.shape[0], self._num_outputs)
        prediction, target = prediction.reshape(rows).float(), target.reshape(rows).float()
        weight = torch.ones_like(target)
        if sample_weight is not None:
            weight = full_weight(sample_weight, target).float()
            prediction, target = (torch.where(weight != 0, each, 0.0) for each in (prediction, target))
        count = weight.sum(0)
        mean = (target * weight).sum(0) / count.clamp(min=_TINY)
        total = self.weight + count
        share = count / total.clamp(min=_TINY)
        apart = mean - self.mean
        self.spread = self.spread + ((target - mean).square() * weight).sum(0) + apart.square() * self.weight * share
        self.mean = self.mean + apart * share
        self.weight = total
        self.error = self.error + ((prediction - target).square() * weight).sum(0)

    def compute(self) -> Tensor:
        """The figure, shape (), float32; NaN before the first `update`, -inf or NaN if all targets are equal."""
        return (1 - self.error / self.spread).mean()


_TINY = torch.finfo(torch.float32).tiny
