"""Starts the processes of tests."""

import multiprocessing
from collections.abc import Callable
from typing import Any

from tests.distributed import scripts
from xlatrainer.distributed import launch

# Seconds to import, and of use after a fork, as this package is not; the first optimizer imports the last of them.
PRELOADED = ["jax.numpy", "torch.utils.data", "torch._dynamo"]


def launch_soon(function: Callable[..., None], *args: Any, devices: int = 2) -> None:
    """Launch two processes with so many devices each, out of a server that has imported others' packages once."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    launch(scripts.on_devices, (devices, function, *args), "forkserver", nprocs=2)
