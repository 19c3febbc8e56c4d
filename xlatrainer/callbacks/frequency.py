"""`Frequency`: how often something is done: at the end of epochs, every so many steps, or every so often."""

from __future__ import annotations

import re
import time
from datetime import timedelta

from xlatrainer.callbacks.durations import seconds_of

__all__ = ["Frequency"]


class Frequency:
    """Tells when it is time again.

    Args:
        value: "epoch"; a number of steps, as an int or "500 steps"; or a time, such as "10 minutes" or a `timedelta`.

    Raises:
        ValueError: For anything else.

    Example:
        >>> every_two = Frequency(2)
        >>> every_two.begin(step=10)
        >>> [step for step in range(11, 17) if every_two.is_due(step)]
        [12, 14, 16]
    """

    def __init__(self, value: str | int | timedelta) -> None:
        self.is_epoch = value == "epoch"
        self.steps: int | None = None
        self.seconds: float | None = None
        text = re.fullmatch(r"(\d+) ?steps?", value) if isinstance(value, str) else None
        if isinstance(value, int) or text is not None:
            self.steps = int(text[1] if text is not None else value)  # type: ignore[arg-type]
            if self.steps < 1:
                raise ValueError(f"a number of steps must be at least 1, got {value!r}")
        elif not self.is_epoch:
            self.seconds = seconds_of(value)

    def refuse_time(self, processes: int) -> None:
        """Raise `ValueError` for a time where several processes train together, whose clocks are not one."""
        if self.seconds is not None and processes > 1:
            raise ValueError(
                f"{processes} processes train together and would not find the same step by the clock: give a number of "
                f'steps, or "epoch"'
            )

    def begin(self, step: int) -> None:
        """Count from this step, and from now."""
        self._step = step
        self._time = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether it is time, after the batch that brought the steps to `step`; then the next one is counted from here.

        Steps are counted by their number: every 10 steps is after step 10, 20, ..., or the first one after it.
        """
        if self.steps is not None:
            is_due = step // self.steps > self._step // self.steps
            self._step = step
            return is_due
        now = time.monotonic()
        if self.seconds is None or now - self._time < self.seconds:
            return False
        self._time = now
        return True
