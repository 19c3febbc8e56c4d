"""Memory that a program frees is used again by the next run, unless that is switched off."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch, xlatrainer as xla
a, b, c = (torch.ones(*shape, device="xla") for shape in ((8192, 8), (8, 1152), (1152, 1)))
def step():
    return ((a @ b).tanh() @ c).sum()  # 38 MB between the products: blocks that large glibc always returns
faults = []
for _ in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step().item()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))  # others in the process (a compiler's thread, the collector) may ask for memory now and then
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
