"""The values of batches for those who write them down: at steps of their choice, without a wait for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from xlatrainer.callbacks.callback import LogValues, MaybeReady

__all__ = ["BatchValues"]

_LOGS_WAITING = 64  # beyond them the oldest is waited for


class BatchValues:
    """Takes the logs of batches in and gives them out when they are computed.

    Args:
        update_freq: "epoch" takes none, "batch" those of every step, a number those of every so many steps.

    Raises:
        ValueError: For anything else.
    """

    def __init__(self, update_freq: str | int) -> None:
        is_number = isinstance(update_freq, int) and not isinstance(update_freq, bool)
        if update_freq not in ("epoch", "batch") and not is_number:
            raise ValueError(f'update_freq must be "epoch", "batch" or a number of steps, got {update_freq!r}')
        self._every = update_freq if isinstance(update_freq, int) else int(update_freq == "batch")
        if self._every < 1 and update_freq != "epoch":
            raise ValueError(f"update_freq must be at least 1, got {update_freq}")
        self.begin(0)

    def begin(self, step: int) -> None:
        """A `fit` begins, with so many steps made before it."""
        self._step = step
        self._waiting: deque[tuple[int, float, LogValues]] = deque()

    def add(self, step: int, logs: LogValues) -> None:
        """Take in the logs of the batch that brought the steps to `step`, if it is one of those wanted."""
        if self._every and step // self._every > self._step // self._every:
            self._waiting.append((step, time.time(), logs))
        self._step = step

    def take(self, wait: bool) -> Iterator[tuple[int, float, LogValues]]:
        """Step, time and logs of those that are computed, in order; with `wait`, of all. Reading them does not wait."""
        while self._waiting:
            logs = self._waiting[0][2]
            is_ready = not isinstance(logs, MaybeReady) or logs.is_ready
            if not (wait or is_ready or len(self._waiting) > _LOGS_WAITING):
                return
            yield self._waiting.popleft()
