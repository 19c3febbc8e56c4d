"""Memory that a program frees is used again by the next run, unless that is switched off; it can be given back."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xlatrainer.backend.host_memory import give_back_freed_memory

SCRIPT = """
import resource
import torch, xlatrainer as xla
a, b, c = (torch.ones(*shape, device="xla") for shape in ((4096, 8), (8, 4096), (4096, 1)))
def step():
    return ((a @ b).tanh() @ c).sum()  # 64 MB between the products: blocks that large glibc always returns
faults = []
for _ in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step().item()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))  # others in the process (a compiler's thread, the collector) may ask for memory now and then
"""

LARGE_BLOCK = """
import ctypes
import torch, xlatrainer as xla
torch.ones(1, device="xla").sum().item()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_void_p], [ctypes.c_ssize_t]
before = libc.sbrk(0)
libc.free(libc.malloc(5 * 2**29))  # nobody writes to it: no memory is taken
print(libc.sbrk(0) - before)
"""


def page_faults(setting: str) -> int:
    environment = {**os.environ, "XLATRAINER_KEEP_MEMORY": setting}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    return int(done.stdout)


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_the_next_run_finds_the_memory_of_the_one_before() -> None:
    kept, returned = page_faults("on"), page_faults("off")
    assert kept < 100  # pages of 4 KiB
    assert returned > 500


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_more_than_two_gigabytes_are_kept_too() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE_BLOCK], check=True, capture_output=True, text=True, timeout=300)
    assert int(done.stdout) > 2**31


@pytest.mark.skipif(sys.platform != "linux", reason="a call of glibc")
def test_freed_memory_is_given_back() -> None:
    blocks = [np.ones(8192) for _ in range(2000)]  # 64 KiB each, which glibc takes from its heap
    del blocks[::100]
    kept = blocks[::50]
    del blocks
    before = resident()
    give_back_freed_memory()
    assert resident() < before - 60 * 2**20
    assert all(block.sum() == 8192 for block in kept)


def resident() -> int:
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
