"""Counters of what the device did: programs compiled and run, transfers, CPU fallbacks.

Names: `UncachedCompile` (programs compiled), `CachedCompile` (programs found in the cache), `Execute` (programs run),
`TransferToDevice`, `TransferFromDevice` (tensors copied), `aten::<operator>` (runs of that operator on the CPU),
`sync::<operator>` (runs of that operator that ended the trace and waited for a number, since the shape of its result,
or what Python does next, depends on data).
"""

import threading
from collections import Counter

__all__ = ["add", "reset", "snapshot", "value"]

_lock = threading.Lock()
_counts: Counter[str] = Counter()


def add(name: str, count: int = 1) -> None:
    """Add `count` to the counter `name`."""
    with _lock:
        _counts[name] += count


def value(name: str) -> int:
    """How often `name` happened since the start or the last `reset`; 0 if never."""
    return _counts[name]


def snapshot() -> dict[str, int]:
    """All counters that are not zero, as a dict of their own."""
    with _lock:
        return {name: count for name, count in _counts.items() if count}


def reset() -> None:
    """Set all counters to zero."""
    with _lock:
        _counts.clear()
