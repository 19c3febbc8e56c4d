"""The functions a user drives the device with; the package exports them under the same names.

May import: everything in backend.
"""

import torch

from xlatrainer import config
from xlatrainer.backend import closures, counters, runtime
from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.executor import wait as wait_for_device
from xlatrainer.backend.random import manual_seed
from xlatrainer.backend.state import state

__all__ = ["device", "device_count", "devices", "manual_seed", "real_devices", "sync", "wait_device_ops"]


def device(index: int | None = None) -> torch.device:
    """The `xla` device of this process.

    Args:
        index: None or 0. A process has one torch device; several chips are reached by sharding, or by a process each.

    Raises:
        IndexError: for any other index.
    """
    if index not in (None, 0):
        raise IndexError(f"there is no device xla:{index}: a process has one torch device, xla:0; leave the index out")
    return torch.device("xla", 0)


def devices() -> list[torch.device]:
    """All torch devices of this process: `[xla:0]`."""
    return [device()]


def real_devices() -> list[str]:
    """The PJRT devices of this process behind `xla:0`, by name: `["CPU:0"]`."""
    return [f"{found.platform.upper()}:{found.id}" for found in runtime.local_devices()]


def device_count() -> int:
    """Number of PJRT devices of this process."""
    return len(runtime.local_devices())


def sync(wait: bool = False) -> None:
    """End the step: run everything recorded so far as one program, then the closures of `add_step_closure`.

    Args:
        wait: also wait until the results are there. By default Python goes on, and only a read waits.

    With nothing pending it runs no program.

    Raises:
        Exception: what failed in a step closure.
    """
    counters.add("MarkStep")
    step_closures = closures.take()
    run_pending("sync")
    closures.run(step_closures)
    if state.reporter is not None:
        state.reporter.stepped()
    if wait or config.get("sync_wait") == "1":
        wait_device_ops()


def wait_device_ops() -> None:
    """Wait until all work that was started on the device is done."""
    wait_for_device()
