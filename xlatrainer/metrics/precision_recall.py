"""`Precision`, `Recall` and `F1`: figures from how often each class was predicted, was right, and was there."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from xlatrainer.metrics.accuracy import is_class_index, unknown_threshold
from xlatrainer.metrics.metric import Metric
from xlatrainer.metrics.weights import full_weight

__all__ = ["F1", "Precision", "Recall"]


class _Counts(Metric):
    """Counts by class.

    Args:
        threshold: Above which a single score means class 1, as for `Accuracy`. Default None, which is an error for such
            predictions.
        average: "binary" is the figure of class 1; "macro" the mean over the classes that were there or predicted.
            Default None: binary for two classes, macro for more.
        name: Its name in the logs.
    """

    right: Tensor
    predicted: Tensor
    present: Tensor

    def __init__(self, threshold: float | None, average: str | None, name: str) -> None:
        super().__init__(name)
        if average not in (None, "binary", "macro"):
            raise ValueError(f'average must be "binary", "macro" or None, got {average!r}')
        self._threshold = threshold
        self._average = average
        self._num_classes: int | None = None

    def set_weighted(self) -> Self:
        super().set_weighted()
        if self._num_classes is not None:
            self._count(self._num_classes)
        return self

    def update(self, prediction: Tensor, target: Tensor, sample_weight: Tensor | None = None) -> None:
        """Take in scores (N, C, ...) with integer classes (N, ...), or single scores with targets of 0 and 1."""
        chosen, truth, num_classes = self._classes(prediction, target)
        if self._num_classes is None:
            self._count(num_classes)
        elif self._num_classes != num_classes:
            raise ValueError(f"{self.name} saw {self._num_classes} classes before, and {num_classes} now")
        dtype = self.right.dtype
        weight = torch.ones_like(truth, dtype=dtype)
        if sample_weight is not None:
            weight = full_weight(sample_weight, target).reshape(truth.shape).to(dtype)
            truth = torch.where(weight != 0, truth, 0)  # what pads a batch may hold no class at all
        right = weight * (chosen == truth)
        self.right = self.right.index_add(0, truth, right)
        self.predicted = self.predicted.index_add(0, chosen, weight)
        self.present = self.present.index_add(0, truth, weight)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:  # of a metric that had seen no batch
            self.reset()
            return
        if self._num_classes is None:
            self._count(len(state["right"]))
        super().load_state_dict(state)

    def compute(self) -> Tensor:
        """The figure, shape (), float32; 0.0 where it would divide by zero, as in scikit-learn."""
        figures = self._figures()
        if self._average == "binary" or (self._average is None and self._num_classes == 2):
            return figures[1].clone()  # a view would be read out of all figures by a program of its own
        seen = ((self.predicted + self.present) > 0).float()
        return (figures * seen).sum() / seen.sum().clamp(min=1)

    @abstractmethod
    def _figures(self) -> Tensor:
        """The figure of each class, shape (C,)."""

    def _count(self, num_classes: int) -> None:
        if self._average == "binary" and num_classes != 2:
            raise ValueError(f'{self.name}: average="binary" is for two classes, there are {num_classes}')
        self._num_classes = num_classes
        for state in ("right", "predicted", "present"):
            self.add_state(state, torch.zeros(num_classes, dtype=torch.float32 if self.weighted else torch.int64))

    def _classes(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor, int]:
        """The predicted and true class of each example, in one dimension, and the number of classes."""
        if is_class_index(prediction, target):
            return prediction.argmax(1).reshape(-1), target.reshape(-1).long(), prediction.shape[1]
        if prediction.shape == target.shape or (prediction.numel() == target.numel() and prediction.shape[-1:] == (1,)):
            if self._threshold is None:
                raise unknown_threshold(self, prediction)
            return (prediction.reshape(-1) > self._threshold).long(), (target.reshape(-1) > 0.5).long(), 2
        raise ValueError(
            f"{self.name} needs scores (N, C, ...) with integer classes (N, ...), or single scores with as many "
            f"targets of 0 or 1; got {tuple(prediction.shape)} and {target.dtype} {tuple(target.shape)}"
        )


class Precision(_Counts):
    """Of the examples that were predicted to be of a class, the share that is.

    Args:
        threshold: Above which a single score means class 1, as for `Accuracy`: 0.0 for logits, 0.5 for probabilities.
            Default None, which is an error for such predictions. (By name, the loss tells it.)
        average: "binary" is the figure of class 1, "macro" the mean over the classes that were there or predicted.
            Default None: binary for two classes, macro for more.
        name: Its name in the logs; default "precision".

    Example:
        >>> precision = Precision(threshold=0.5)
        >>> precision.update(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, 1]))
        >>> precision.compute()
        tensor(0.5000)
    """

    def __init__(self, threshold: float | None = None, average: str | None = None, name: str = "precision") -> None:
        super().__init__(threshold, average, name)

    def _figures(self) -> Tensor:
        return _share(self.right, self.predicted)


class Recall(_Counts):
    """Of the examples of a class, the share that was predicted to be; arguments as for `Precision`.

    Example:
        >>> recall = Recall(threshold=0.5)
        >>> recall.update(torch.tensor([0.9, 0.8, 0.7, 0.1]), torch.tensor([1, 0, 1, 1]))
        >>> recall.compute()
        tensor(0.6667)
    """

    def __init__(self, threshold: float | None = None, average: str | None = None, name: str = "recall") -> None:
        super().__init__(threshold, average, name)

    def _figures(self) -> Tensor:
        return _share(self.right, self.present)


class F1(_Counts):
    """The harmonic mean of precision and recall; arguments as for `Precision`.

    Example:
        >>> f1 = F1(threshold=0.5)
        >>> f1.update(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, 1]))
        >>> f1.compute()
        tensor(0.5000)
    """

    def __init__(self, threshold: float | None = None, average: str | None = None, name: str = "f1") -> None:
        super().__init__(threshold, average, name)

    def _figures(self) -> Tensor:
        return _share(2 * self.right, self.predicted + self.present)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 where the whole is 0."""
    return torch.where(whole > 0, part / whole.clamp(min=_TINY if whole.is_floating_point() else 1), 0.0)


_TINY = torch.finfo(torch.float32).tiny
