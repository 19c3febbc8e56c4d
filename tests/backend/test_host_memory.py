"""Memory that a program frees is used again by the next run, unless that is switched off."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch, xlatrainer as xla
x = torch.ones(1000, 1000, device="xla")  # 4 MB; the temporaries of a chain of products are a few times that
def step():
    y = x
    for _ in range(6):
        y = (y @ x).tanh()
    return y.sum()
for _ in range(3):
    step().item()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step().item()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
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
    assert kept < 1000  # pages of 4 KiB
    assert returned > 5 * kept
