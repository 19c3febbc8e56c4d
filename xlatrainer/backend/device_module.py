"""What torch asks of a device module: `torch.xla` after registration.

torch looks these functions up by name on `torch.get_device_module("xla")`. May import: state, device functions,
runtime.
"""

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from xlatrainer.backend.executor import run_pending, wait
from xlatrainer.backend.random import get_rng_state_tensor, manual_seed, set_rng_state_tensor
from xlatrainer.backend.state import state

__all__ = ["make_device_module"]


def is_available() -> bool:
    """Always true: XLA runs on any machine, on the CPU at the least."""
    return True


def is_initialized() -> bool:
    """Always true: the device starts by itself at its first use."""
    return True


def is_in_bad_fork() -> bool:
    """True in a forked child, where the device cannot be used."""
    return state.forked


def device_count() -> int:
    """Number of torch devices of this type: one a process."""
    return 1


def current_device() -> int:
    """Index of the current device: always 0."""
    return 0


def set_device(device: Any) -> None:
    """Accepts the one device there is; raises `IndexError` for another."""
    index = device if isinstance(device, int) else torch.device(device).index or 0
    if index != 0:
        raise IndexError(f"there is no device xla:{index}; a process has one torch device, xla:0")


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Context manager that makes `device` the current one: there is only one."""
    set_device(device)
    yield


def synchronize(device: Any = None) -> None:
    """Run what is pending and wait for it."""
    run_pending("torch.xla.synchronize")
    wait()


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes `torch.autocast("xla", dtype=...)` accepts."""
    return [torch.bfloat16, torch.float16]


def make_device_module() -> ModuleType:
    """The module to register."""
    module = ModuleType("torch.xla", __doc__)
    functions = {
        "is_available": is_available,
        "is_initialized": is_initialized,
        "_is_in_bad_fork": is_in_bad_fork,
        "device_count": device_count,
        "current_device": current_device,
        "device": device,
        "set_device": set_device,
        "synchronize": synchronize,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "get_rng_state": get_rng_state_tensor,
        "set_rng_state": set_rng_state_tensor,
        "get_amp_supported_dtype": get_amp_supported_dtype,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    module._initialized = True  # type: ignore[attr-defined]  # torch.utils.checkpoint asks before it saves random states
    return module
