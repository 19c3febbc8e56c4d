"""Python's garbage collector, out of the way of what makes many objects and no garbage.

May import: nothing of ours.
"""

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """A block without the collector.

    It looks through all objects there are whenever enough new ones have come: a fifth of a second each time, with torch
    and jax loaded. A program that is lowered, or the state that a step can reach, is hundreds of thousands of objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
