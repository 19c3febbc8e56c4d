"""How much memory is in use: the device's, or the process's where XLA computes on the CPU.

May import: runtime.
"""

import os
import resource
import sys
from pathlib import Path

from xlatrainer.backend import runtime

__all__ = ["memory_in_use"]


def memory_in_use() -> int:
    """Bytes in use on the device now; where XLA computes on the CPU, the resident memory of this process."""
    statistics = runtime.default_device().memory_stats()
    if statistics and "bytes_in_use" in statistics:
        return int(statistics["bytes_in_use"])
    return _resident()


def _resident() -> int:
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
