"""Lengths of time as users write them."""

from __future__ import annotations

import re
from datetime import timedelta

__all__ = ["Duration", "seconds_of"]

Duration = str | float | timedelta

_UNITS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "day": 86400}
_CLOCK = (1, 60, 3600, 86400)


def seconds_of(duration: Duration) -> float:
    """The seconds in `duration`.

    Args:
        duration: "10 minutes", "90 s", "1.5 hours", "2 days"; "DD:HH:MM:SS" or any end of it ("00:30:00"); a
            `timedelta`; or a number of seconds.

    Raises:
        ValueError: For other texts, and for what is not above 0.

    Example:
        >>> seconds_of("10 minutes"), seconds_of("01:00:00")
        (600.0, 3600.0)
    """
    seconds: float | None
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        seconds = _parse(duration.strip().lower())
    else:
        seconds = float(duration)
    if seconds is None or not seconds > 0:
        raise ValueError(
            f'{duration!r} is no length of time; write "10 minutes", "90 s", "2 hours", "DD:HH:MM:SS", a timedelta or '
            f"a number of seconds above 0"
        )
    return seconds


def _parse(text: str) -> float | None:
    if re.fullmatch(r"\d+(:\d+){1,3}", text):
        return float(sum(int(part) * unit for part, unit in zip(reversed(text.split(":")), _CLOCK, strict=False)))
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text)
    if match is None:
        return None
    unit = _UNITS.get(match[2]) or _UNITS.get(match[2].removesuffix("s"))
    return None if unit is None else float(match[1]) * unit
