"""Memory that a step frees stays with the process, so that the next step need not ask the system for it again.

XLA's CPU client allocates all temporaries of a program anew for each run. By default glibc returns blocks that large to
the system at once, and each page of the next run's is mapped and cleared again: a sixth of a small transformer's step
(`benchmarks/`, docs/performance.md). The settings are for the whole process; `XLATRAINER_KEEP_MEMORY=off` leaves them.

May import: config.
"""

import ctypes
import platform
import sys
from importlib import metadata
from importlib.util import find_spec

import jax

from xlatrainer import config

__all__ = ["give_back_freed_memory", "keep_freed_memory"]

# Of glibc's malloc.h: mallopt's parameters.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = -1  # the largest number would still be 2 GB


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed; returns whether it was told.

    Only where XLA is going to run on the CPU, and before its threads exist: a thread that has an arena of its own,
    which holds blocks of up to 64 MB, would go on asking the system for larger ones. The price: the threads of XLA's
    compiler wait for each other's allocations, a third of their time. (XLA can split temporaries into blocks that such
    an arena keeps, but does not serialize a program that has several.)
    """
    if config.get("keep_memory") == "off" or not (_has_glibc() and _expects_cpu()):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wanted = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted)


def give_back_freed_memory() -> None:
    """Return what is free now to the system, such as what a compilation needed."""
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _has_glibc() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _expects_cpu() -> bool:
    """Whether jax will choose the CPU, as far as can be told without starting it."""
    chosen = str(config.get("platform")).upper()
    if chosen:
        return chosen == "CPU"
    platforms = getattr(jax.config, "jax_platforms", None)  # which jax's own annotations leave out
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not metadata.entry_points(group="jax_plugins") and find_spec("libtpu") is None
