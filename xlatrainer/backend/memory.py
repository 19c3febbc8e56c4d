"""How much memory there is and is in use: the device's, or the process's where XLA computes on the CPU.

May import: runtime.
"""

import os
import resource
import sys
from pathlib import Path

import torch

from xlatrainer.backend import runtime

__all__ = ["get_memory_info", "memory_in_use", "memory_limit"]


def memory_in_use() -> int:
    """Bytes in use on the device now; where XLA computes on the CPU, the resident memory of this process."""
    return get_memory_info()["bytes_used"]


def get_memory_info(device: torch.device | str | None = None) -> dict[str, int]:
    """The memory of the device; where XLA computes on the CPU, of this process and the machine. Runs nothing.

    Args:
        device: the one device; default None.

    Returns:
        "bytes_used", "bytes_limit" and "peak_bytes_used"; the same in KiB as "kb_total" (the limit) and "kb_free" (what
        is not used of it).
    """
    statistics = runtime.default_device().memory_stats()
    if statistics and "bytes_in_use" in statistics:
        used = int(statistics["bytes_in_use"])
        limit = int(statistics.get("bytes_limit", used))
        peak = int(statistics.get("peak_bytes_in_use", used))
    else:
        used, limit, peak = _resident(), _of_the_machine(), _peak()
    return {
        "bytes_used": used,
        "bytes_limit": limit,
        "peak_bytes_used": max(peak, used),
        "kb_total": limit // 1024,
        "kb_free": (limit - used) // 1024,
    }


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
    return _peak()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _of_the_machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
