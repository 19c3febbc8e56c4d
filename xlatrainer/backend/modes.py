"""Eager mode: every operator runs at once.

May import: executor, measurements, state, config.
"""

import time

from xlatrainer import config
from xlatrainer.backend import measurements
from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.state import state

__all__ = ["begin_as_set", "eager_mode", "is_eager_mode"]


def eager_mode(enable: bool) -> None:
    """Run every operator at once from now on, as PyTorch does on the CPU, or record them again.

    An operator is a program of its own, compiled for each kind of arguments when it comes first and found from then on
    in one look-up; the metric `EagerOpExecuteTime` has a sample for each. Functions made by `compile`, and the steps of
    a `Trainer`, stay whole programs. What is pending runs when the mode changes.

    Args:
        enable: True for eager mode, False for lazy mode, the default.

    Example:
        >>> import torch, xlatrainer as xla
        >>> xla.eager_mode(True)
        >>> xla.is_eager_mode()
        True
        >>> torch.ones(2, device="xla") + 1
        tensor([2., 2.], device='xla:0')
        >>> xla.eager_mode(False)
    """
    run_pending("the mode changes")
    state.set_eager(_run_operator if enable else None)


def is_eager_mode() -> bool:
    """Whether operators run at once."""
    return state.is_eager


def begin_as_set() -> None:
    """At import: the mode that the environment asks for."""
    if "1" in (config.get("get_tensors_opbyop"), config.get("sync_tensors_opbyop")):
        state.set_eager(_run_operator)


def _run_operator() -> None:
    start = time.perf_counter()
    run_pending("eager mode")
    measurements.record("EagerOpExecuteTime", time.perf_counter() - start)
