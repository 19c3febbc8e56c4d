"""How much memory there is and is in use: the device's, or the process's where XLA computes on the CPU.

May import: runtime.
"""

import os
import resource
import sys
from pathlib import Path

from xlatrainer.backend import runtime

__all__ = ["memory_in_use", "memory_limit"]


def memory_in_use() -> int:
    """Bytes in use on the device now; where XLA computes on the CPU, the resident memory of this process."""
    statistics = runtime.default_device().memory_stats()
    if statistics and "bytes_in_use" in statistics:
        return int(statistics["bytes_in_use"])
    return _resident()


def memory_limit() -> int | None:
    """Bytes that the device has; where XLA computes on the CPU, those of the machine that are free. None if unknown."""
    statistics = runtime.default_device().memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"])
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _resident() -> int:
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
