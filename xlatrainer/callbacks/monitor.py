"""`Monitor`: the value a callback watches, and when it is better than another. One rule for every callback."""

from __future__ import annotations

import math
import warnings
from typing import Literal

from xlatrainer.callbacks.callback import LogValues

__all__ = ["Mode", "Monitor"]

Mode = Literal["auto", "min", "max"]

_LOWER_IS_BETTER = ("loss", "mae", "mse", "rmse", "mape", "error", "perplexity", "bce", "nll")
_HIGHER_IS_BETTER = ("accuracy", "acc", "auc", "auroc", "f1", "precision", "recall", "r2", "iou", "bleu")


class Monitor:
    """Reads one name from the logs and compares its values.

    Args:
        name: The name in the logs, such as "val_loss".
        mode: "min" if lower is better, "max" if higher is, "auto" (default) to tell by the name.
        min_delta: By how much a value must be better to count, in the units of the value; its sign does not matter, as
            in Keras. Default 0.
        owner: Who watches, for messages.

    Raises:
        ValueError: For an unknown mode, and for "auto" with a name that does not tell.

    Example:
        >>> Monitor("val_accuracy").is_better(0.9, than=0.8)
        True
    """

    def __init__(self, name: str, mode: Mode = "auto", min_delta: float = 0.0, owner: str = "the callback") -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f'mode must be "auto", "min" or "max", not {mode!r}')
        self.name = name
        self.higher_is_better = _higher_is_better(name) if mode == "auto" else mode == "max"
        self._min_delta = abs(min_delta)
        self._owner = owner
        self.begin()

    def begin(self) -> None:
        """A `fit` begins."""
        self._appeared = False
        self._missed: list[str] = []

    @property
    def worst(self) -> float:
        """A value that every finite one is better than."""
        return -math.inf if self.higher_is_better else math.inf

    def read(self, logs: LogValues) -> float | None:
        """The watched value; None if it is not in these logs, with a warning the first time."""
        if self.name in logs:
            self._appeared = True
            return logs[self.name]
        if not self._missed:
            self._missed = sorted(logs)
            if not self._appeared:
                warnings.warn(self._message(), stacklevel=2)
        return None

    def end(self) -> None:
        """A `fit` ends.

        Raises:
            ValueError: If the name was looked for and never there.
        """
        if self._missed and not self._appeared:
            raise ValueError(f"{self._message()} It was never there, so {self._owner} has done nothing.")

    def is_better(self, value: float, than: float) -> bool:
        """Whether `value` is better than `than` by more than `min_delta`. NaN is better than nothing."""
        return value - self._min_delta > than if self.higher_is_better else value + self._min_delta < than

    def _message(self) -> str:
        hint = " Pass validation_data to fit for the val_ names." if self.name.startswith("val_") else ""
        return f"{self._owner} monitors {self.name!r}, which is not in the logs; the names are {self._missed}.{hint}"


def _higher_is_better(name: str) -> bool:
    words = name.lower().removeprefix("val_").replace("-", "_").split("_")
    lower = any(word in _LOWER_IS_BETTER for word in words)
    higher = any(word in _HIGHER_IS_BETTER for word in words)
    if lower == higher:
        raise ValueError(f'whether a higher or a lower {name!r} is better is not known; pass mode="max" or mode="min"')
    return higher
