"""`Accuracy`, `BinaryAccuracy` and `TopKAccuracy`: how many predictions are right."""

import torch
from torch import Tensor

from xlatrainer.metrics.mean import Mean
from xlatrainer.metrics.metric import Metric
from xlatrainer.metrics.weights import weighted_sum

__all__ = ["Accuracy", "BinaryAccuracy", "TopKAccuracy", "is_class_index", "unknown_threshold"]


class Accuracy(Mean):
    """The share of right predictions; the kind of task is told by shapes and dtypes.

    ==================================  =====================================  =================================
    prediction                          target                                 right if
    ==================================  =====================================  =================================
    (N, C, ...) scores                  (N, ...) integer classes               the class has the highest score
    (N, C, ...) scores, C > 1           (N, C, ...) float, one-hot or shares   both have it at the same class
    (N, ...) or (N, 1), one score       same number of values, 0 or 1          prediction > threshold is target
    ==================================  =====================================  =================================

    Args:
        threshold: Above which a single score means class 1: 0.0 for logits, 0.5 for probabilities. Default None, which
            is an error for such predictions: which of the two they are cannot be told from the values. (By name,
            "accuracy" takes it from the loss.)
        name: Its name in the logs; default "accuracy".

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        >>> accuracy.compute()
        tensor(0.5000)
    """

    def __init__(self, threshold: float | None = None, name: str = "accuracy") -> None:
        super().__init__(name, torch.int64)
        self._threshold = threshold

    def update(  # type: ignore[override]
        self, prediction: Tensor, target: Tensor, sample_weight: Tensor | None = None
    ) -> None:
        self._add(*weighted_sum(self._right(prediction, target), sample_weight))

    def _right(self, prediction: Tensor, target: Tensor) -> Tensor:
        if is_class_index(prediction, target):
            return prediction.argmax(1) == target
        if prediction.shape == target.shape and prediction.dim() > 1 and prediction.shape[1] > 1:
            if target.is_floating_point():
                return prediction.argmax(1) == target.argmax(1)
        elif prediction.numel() == target.numel():
            if self._threshold is None:
                raise unknown_threshold(self, prediction)
            return _agree(prediction.reshape(target.shape), target, self._threshold)
        raise ValueError(
            f"{self.name}: predictions of shape {tuple(prediction.shape)} and {target.dtype} targets of shape "
            f"{tuple(target.shape)} do not go together. Accepted: scores (N, C, ...) with integer classes (N, ...) or "
            f"float targets (N, C, ...); single scores (N,) or (N, 1) with as many targets of 0 or 1"
        )


class BinaryAccuracy(Mean):
    """The share of right answers to yes-or-no questions: every value of the prediction is one.

    Args:
        threshold: As for `Accuracy`: 0.0 for logits, 0.5 for probabilities. Default None, which is an error.
        name: Its name in the logs; default "binary_accuracy".

    Example:
        >>> accuracy = BinaryAccuracy(threshold=0.0)
        >>> accuracy.update(torch.tensor([[2.0, -1.0], [0.5, 3.0]]), torch.tensor([[1, 0], [0, 1]]))
        >>> accuracy.compute()
        tensor(0.7500)
    """

    def __init__(self, threshold: float | None = None, name: str = "binary_accuracy") -> None:
        super().__init__(name, torch.int64)
        self._threshold = threshold

    def update(  # type: ignore[override]
        self, prediction: Tensor, target: Tensor, sample_weight: Tensor | None = None
    ) -> None:
        """Take in scores (N, ...) and targets of 0 and 1 of the same shape, or (N, 1) scores and (N,) targets."""
        if self._threshold is None:
            raise unknown_threshold(self, prediction)
        if prediction.shape != target.shape and prediction.shape != (*target.shape, 1):
            raise ValueError(
                f"{self.name} needs predictions and targets of the same shape, got {tuple(prediction.shape)} and "
                f"{tuple(target.shape)}"
            )
        self._add(*weighted_sum(_agree(prediction.reshape(target.shape), target, self._threshold), sample_weight))


class TopKAccuracy(Mean):
    """The share of examples whose class is among the k highest scores.

    Args:
        k: How many; default 5.
        name: Its name in the logs; default None, "top{k}_accuracy".

    Example:
        >>> top2 = TopKAccuracy(2)
        >>> top2.update(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 2]))
        >>> top2.compute()
        tensor(0.5000)
    """

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        super().__init__(name or f"top{k}_accuracy", torch.int64)
        self._k = k

    def update(  # type: ignore[override]
        self, prediction: Tensor, target: Tensor, sample_weight: Tensor | None = None
    ) -> None:
        if not is_class_index(prediction, target) or prediction.shape[1] < self._k:
            raise ValueError(
                f"{self.name} needs scores (N, C, ...) of at least {self._k} classes and integer targets (N, ...); got "
                f"{tuple(prediction.shape)} and {target.dtype} {tuple(target.shape)}"
            )
        right = (prediction.topk(self._k, dim=1).indices == target.unsqueeze(1)).any(dim=1)
        self._add(*weighted_sum(right, sample_weight))


def unknown_threshold(metric: Metric, prediction: Tensor) -> ValueError:
    """The error of a metric that would have to guess what its scores are."""
    kind = type(metric).__name__
    return ValueError(
        f"{metric.name}: one score an example (shape {tuple(prediction.shape)}) may be a logit or a probability; use "
        f"{kind}(threshold=0.0) for logits, {kind}(threshold=0.5) for probabilities"
    )


def _agree(prediction: Tensor, target: Tensor, threshold: float) -> Tensor:
    return (prediction > threshold) == (target > 0.5)


def is_class_index(prediction: Tensor, target: Tensor) -> bool:
    """Whether `target` holds classes, as integers (N, ...), for the scores in `prediction` (N, C, ...), C > 1."""
    return (
        not target.is_floating_point()
        and target.dtype != torch.bool
        and prediction.is_floating_point()
        and prediction.dim() == target.dim() + 1
        and prediction.dim() > 1
        and prediction.shape[1] > 1
        and prediction.shape[:1] + prediction.shape[2:] == target.shape
    )
