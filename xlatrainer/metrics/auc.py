"""`AUC`: the area under the ROC curve, from counts at a grid of thresholds."""

from typing import Self

import torch
from torch import Tensor

from xlatrainer.metrics.accuracy import is_class_index, unknown_threshold
from xlatrainer.metrics.metric import Metric
from xlatrainer.metrics.weights import full_weight

__all__ = ["AUC"]


class AUC(Metric):
    """The area under the ROC curve: how probable it is that an example of class 1 has a higher score than one of 0.

    What is kept are the numbers of examples of each class between neighbouring thresholds, as in Keras, and not the
    scores themselves. The figure is exact for scores that are rounded up to the next threshold: two examples between
    the same two thresholds count as a tie, one half, whatever their order. With 200 evenly spread thresholds and scores
    that are spread out, that is right to about two decimals; with scores crowded near 0 and 1 it may be less, and more
    thresholds help.

    Args:
        threshold: Tells what a single score is, as for `Accuracy`: 0.0 for logits, which go through a sigmoid, 0.5 for
            probabilities. Default None, which is an error for such predictions. (By name, "auc" takes it from the
            loss.)
        num_thresholds: At least 2; default 200, as in Keras.
        name: Its name in the logs; default "auc".

    Example:
        >>> auc = AUC(threshold=0.5)
        >>> auc.update(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
        >>> auc.compute()
        tensor(0.7500)
    """

    positives: Tensor
    negatives: Tensor

    def __init__(self, threshold: float | None = None, num_thresholds: int = 200, name: str = "auc") -> None:
        super().__init__(name)
        if num_thresholds < 2:
            raise ValueError(f"num_thresholds must be at least 2, got {num_thresholds}")
        self._threshold = threshold
        self._bins = num_thresholds - 1
        self._declare(torch.int64)

    def set_weighted(self) -> Self:
        super().set_weighted()
        self._declare(torch.float32)
        return self

    def _declare(self, dtype: torch.dtype) -> None:
        for state in ("positives", "negatives"):
            self.add_state(state, torch.zeros(self._bins, dtype=dtype))

    def update(self, prediction: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> None:
        """Take in single scores (N,) or (N, 1), or the scores (N, 2) of two classes, and targets of 0 and 1."""
        score = self._probability(prediction, target).reshape(-1)
        dtype = self.positives.dtype
        weight = torch.ones_like(score, dtype=dtype)
        if sample_weight is not None:
            weight = full_weight(sample_weight, target).reshape(-1).to(dtype)
            score = torch.where(weight != 0, score, 0.0)
        place = (torch.ceil(score * self._bins) - 1).clamp(0, self._bins - 1).long()
        is_positive = (target.reshape(-1) > 0.5).to(dtype)
        self.positives = self.positives.index_add(0, place, weight * is_positive)
        self.negatives = self.negatives.index_add(0, place, weight * (1 - is_positive))

    def compute(self) -> Tensor:
        """The area, shape (), float32; NaN unless there were examples of both classes."""
        positives, negatives = self.positives.float(), self.negatives.float()
        higher = positives.sum() - positives.cumsum(0)
        pairs = (negatives * (higher + positives / 2)).sum()
        return pairs / (positives.sum() * negatives.sum())

    def _probability(self, prediction: Tensor, target: Tensor) -> Tensor:
        if is_class_index(prediction, target) and prediction.shape[1] == 2:
            scores = prediction.detach().float()
            return torch.sigmoid(scores[:, 1] - scores[:, 0])
        if prediction.shape not in (target.shape, (*target.shape, 1)) and (*prediction.shape, 1) != target.shape:
            raise ValueError(
                f"{self.name} needs one score an example, (N,) or (N, 1), with as many targets of 0 or 1, or scores "
                f"(N, 2) with classes (N,); got {tuple(prediction.shape)} and {tuple(target.shape)}"
            )
        if self._threshold is None:
            raise unknown_threshold(self, prediction)
        scores = prediction.detach().float()
        return torch.sigmoid(scores) if self._threshold == 0.0 else scores
