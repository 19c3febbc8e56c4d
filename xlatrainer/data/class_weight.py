"""`ClassWeight`: weights of classes as sample weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xlatrainer.data.batch import WEIGHT_KEY, Arguments, Batch, as_tensor, split_batch

__all__ = ["ClassWeight"]

_NONE = Arguments(frozenset(), takes_any=False)  # labels under any of their names are targets


class ClassWeight:
    """Gives each row of a batch the weight of its class, times the sample weight that it has already.

    Args:
        weights: By class, counted from 0. A class that is left out weighs 1.

    Raises:
        TypeError: If `weights` is not such a mapping.
        ValueError: For a negative class or weight.

    Example:
        >>> weigh = ClassWeight({0: 1.0, 1: 3.0})
        >>> weigh((torch.zeros(3, 2), torch.tensor([0, 1, 5])))[2]
        tensor([1., 3., 1.])
    """

    def __init__(self, weights: Mapping[int, float]) -> None:
        if not isinstance(weights, Mapping) or not all(isinstance(key, int | np.integer) for key in weights):
            raise TypeError(f"class_weight must be a dict from classes (ints) to weights, got {weights!r}")
        if any(key < 0 or value < 0 for key, value in weights.items()):
            raise ValueError(f"classes and weights must not be negative, got {dict(weights)}")
        self._weights = torch.ones(max(weights, default=0) + 2)
        for key, value in weights.items():
            self._weights[int(key)] = float(value)

    def __call__(self, batch: Any) -> Any:
        """`batch` with the weights: as its third item, or under the key "sample_weight".

        Raises:
            TypeError: If the targets are not one class a row.
        """
        split = split_batch(batch, _NONE)
        weight = self._of(split.targets)
        if split.sample_weight is not None:
            weight = weight * as_tensor(split.sample_weight)
        if isinstance(batch, Mapping):
            return {**batch, WEIGHT_KEY: weight}
        return Batch(split.inputs, split.targets, weight)

    def _of(self, targets: Any) -> Tensor:
        """The weight of each row: integers (N,) or (N, 1), float 0 and 1 of that shape, or one-hot (N, C)."""
        if not isinstance(targets, Tensor | np.ndarray):
            came = "none" if targets is None else f"a {type(targets).__name__}"
            raise TypeError(
                f"class_weight needs targets that are one class a row, shape (rows,); the targets are {came}"
            )
        classes = as_tensor(targets)
        if classes.dim() == 2 and classes.shape[1] > 1 and classes.is_floating_point():
            classes = classes.argmax(1)
        elif classes.dim() == 2 and classes.shape[1] == 1:
            classes = classes.squeeze(1)
        if classes.dim() != 1:
            raise TypeError(
                f"class_weight needs targets that are one class a row, shape (rows,), (rows, 1), or one-hot and float; "
                f"got {tuple(targets.shape)} of {targets.dtype}"
            )
        last = self._weights.shape[0] - 1  # stands for all classes beyond those that were given
        return self._weights.to(classes.device)[classes.long().clamp(max=last)]
