"""The random states that a training depends on: Python's, NumPy's, torch's and the device's."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import xlatrainer.backend.random as device_random

__all__ = ["host_random_states", "random_states", "restore_random_states"]


def random_states() -> dict[str, Any]:
    """All global random states of this process, as plain data and CPU tensors. Waits for nothing.

    Example:
        >>> before = random_states()
        >>> value = torch.rand(())
        >>> restore_random_states(before)
        >>> torch.equal(torch.rand(()), value)
        True
    """
    return {**host_random_states(), "xla": device_random.get_rng_state_tensor()}


def host_random_states() -> dict[str, Any]:
    """Those of `random_states` without the device's."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": dict(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Return to what `random_states` or `host_random_states` gave; a part of it returns to that part."""
    if "python" in states:
        own = states["python"]
        random.setstate((own["version"], tuple(own["words"].tolist()), own["gauss"]))
    if "numpy" in states:
        np.random.set_state(dict(states["numpy"]))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "xla" in states:
        device_random.set_rng_state_tensor(states["xla"])
