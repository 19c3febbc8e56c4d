"""Python's garbage collector, out of the way of what makes many objects and no garbage.

May import: nothing of ours.
"""

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_paused", "older_objects_set_aside"]


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


@contextlib.contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """A block in which the collector looks through newer objects alone: garbage among older ones stays until its end.

    Does nothing where somebody froze objects before: the end of the block would thaw those, too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
