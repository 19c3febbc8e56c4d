"""`Timer`: how long a training takes, and no longer than that."""

from __future__ import annotations

import time
from typing import Any

from xlatrainer.callbacks.callback import LogValues
from xlatrainer.callbacks.durations import Duration, seconds_of
from xlatrainer.callbacks.per_fit import PerFitCallback

__all__ = ["Timer"]


class Timer(PerFitCallback):
    """Measures a `fit`, and ends it after the batch or the epoch in which the time is up.

    The time is a part of the checkpoints: a training that goes on has what is left of it.

    Args:
        duration: "2 hours", "DD:HH:MM:SS", a `timedelta` or seconds; default None, no limit.
        interval: When to look: "batch" (default) or "epoch".
        verbose: 1 prints when the time is up; default 0.

    Example:
        >>> Timer("00:30:00").duration
        1800.0
    """

    def __init__(self, duration: Duration | None = None, interval: str = "batch", verbose: int = 0) -> None:
        if interval not in ("batch", "epoch"):
            raise ValueError(f'interval must be "batch" or "epoch", got {interval!r}')
        self.duration = None if duration is None else seconds_of(duration)
        self.interval = interval
        self.verbose = verbose
        self._began: float | None = None
        self.reset()

    def reset(self) -> None:
        self._before = 0.0

    def time_elapsed(self) -> float:
        """Seconds of training so far, those before a checkpoint was loaded included."""
        return self._before + (0.0 if self._began is None else time.monotonic() - self._began)

    def time_remaining(self) -> float | None:
        """Seconds left, at least 0; None without a limit."""
        return None if self.duration is None else max(self.duration - self.time_elapsed(), 0.0)

    def on_train_begin(self, logs: LogValues) -> None:
        super().on_train_begin(logs)
        self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        if self.interval == "batch":
            self._look()

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        self._look()

    def on_train_end(self, logs: LogValues) -> None:
        super().on_train_end(logs)
        self._before, self._began = self.time_elapsed(), None

    def state_dict(self) -> dict[str, Any]:
        return {"_before": self.time_elapsed()}

    def _look(self) -> None:
        if self.time_remaining() == 0.0 and not self.trainer.stop_training:
            self.trainer.stop_training = True
            if self.verbose:
                print(f"The time is up: {self.time_elapsed():.1f} s of {self.duration:.1f} s")
