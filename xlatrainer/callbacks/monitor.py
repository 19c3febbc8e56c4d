"""`Monitor`: the value a callback watches, and when it is better than another. One rule for every callback."""

from __future__ import annotations

import math
from typing import Literal

from xlatrainer.callbacks.callback import LogValues

__all__ = ["Mode", "Monitor"]

Mode = Literal["auto", "min", "max"]

_LOWER_IS_BETTER = ("loss", "mae", "mse", "error", "perplexity")
_HIGHER_IS_BETTER = ("accuracy", "acc", "auc", "f1", "precision", "recall")


class Monitor:
    """Reads one name from the logs and compares its values.

    Args:
        name: The name in the logs, such as "val_loss".
        mode: "min" if lower is better, "max" if higher is, "auto" (default) to tell by the name.
        min_delta: By how much a value must be better to count, in the units of the value; default 0.

    Raises:
        ValueError: For an unknown mode, a negative `min_delta`, and for "auto" with a name that does not tell.

    Example:
        >>> Monitor("val_accuracy").is_better(0.9, than=0.8)
        True
    """

    def __init__(self, name: str, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f'mode must be "auto", "min" or "max", not {mode!r}')
        if min_delta < 0:
            raise ValueError(f"min_delta must not be negative, got {min_delta}")
        self.name = name
        self._higher = _higher_is_better(name) if mode == "auto" else mode == "max"
        self._min_delta = min_delta

    @property
    def worst(self) -> float:
        """A value that every finite one is better than."""
        return -math.inf if self._higher else math.inf

    def read(self, logs: LogValues) -> float:
        """The watched value.

        Raises:
            ValueError: If the logs have no such name; the message lists the names they have.
        """
        if self.name not in logs:
            hint = " Pass validation_data to fit for the val_ names." if self.name.startswith("val_") else ""
            raise ValueError(f"there is no {self.name!r} to monitor; the names are {sorted(logs)}.{hint}")
        return logs[self.name]

    def is_better(self, value: float, than: float) -> bool:
        """Whether `value` is better than `than` by more than `min_delta`. NaN is better than nothing."""
        return value - self._min_delta > than if self._higher else value + self._min_delta < than


def _higher_is_better(name: str) -> bool:
    words = name.lower().removeprefix("val_").replace("-", "_").split("_")
    lower = any(word in _LOWER_IS_BETTER for word in words)
    higher = any(word in _HIGHER_IS_BETTER for word in words)
    if lower == higher:
        raise ValueError(f'whether a higher or a lower {name!r} is better is not known; pass mode="max" or mode="min"')
    return higher
