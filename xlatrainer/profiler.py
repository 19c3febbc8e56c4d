"""Profiles of the device and the host, through `jax.profiler`; TensorBoard's profile plugin and Perfetto read them.

with xla.profiler.trace("profile"):
    for index, batch in enumerate(loader):
        with xla.profiler.StepTrace("train", step_num=index):
            train_step(batch)
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jax

from xlatrainer.backend.device import wait_device_ops
from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.state import state

__all__ = ["StepTrace", "Trace", "start_server", "start_trace", "stop_trace", "trace"]


def start_server(port: int = 9012) -> Any:
    """Let TensorBoard's "capture profile" reach this process.

    Args:
        port: on this machine. Default 9012.

    Returns:
        The server, which lives as long as somebody holds it.
    """
    return jax.profiler.start_server(port)


def start_trace(logdir: str | os.PathLike[str]) -> None:
    """Begin to record; `stop_trace` writes a profile into a folder of its own below `logdir`."""
    jax.profiler.start_trace(os.fspath(logdir))


def stop_trace() -> None:
    """Run what is pending, wait for the device, and write the profile that `start_trace` began."""
    run_pending("a profile ends")
    wait_device_ops()
    jax.profiler.stop_trace()


@contextlib.contextmanager
def trace(logdir: str | os.PathLike[str]) -> Iterator[Path]:
    """Record a block.

    Args:
        logdir: the folder for TensorBoard's `--logdir`.

    Returns:
        The context's value is the folder; the profile is in `plugins/profile/` below it once the block has ended.
    """
    start_trace(logdir)
    try:
        yield Path(logdir)
    finally:
        stop_trace()


class Trace(jax.profiler.TraceAnnotation):
    """A block that a profile shows under a name, on the line of the thread that runs it.

    With `XLA_HLO_DEBUG=1` the names of the blocks, and of the modules, in which an operator was recorded are in the
    program too, so that a profile of the device shows them.

    Args:
        name: what the profile shows.
        **kwargs: further values that the profile shows with it.
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name, **kwargs)
        self._name = name

    def __enter__(self) -> Self:
        state.scopes.append(self._name)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        state.scopes.pop()
        super().__exit__(*error)


class StepTrace(jax.profiler.StepTraceAnnotation):
    """A block that is a step of training, by which TensorBoard groups what it shows.

    Args:
        name: of all such steps, "train" say.
        step_num: which one.
    """
