"""The device's random state: a seed and the number of draws since. The key of a draw depends on these two alone.

May import: state, executor.
"""

from typing import Any

import torch

from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.state import state

__all__ = ["get_rng_state", "manual_seed", "set_rng_state"]


def _settle() -> None:
    if state.trace.random_draws:
        run_pending("the random state is set")  # a program draws with one seed: what is recorded keeps its own


def manual_seed(seed: int) -> None:
    """Seed the device's random numbers. `torch.manual_seed` calls it too.

    Args:
        seed: an int of up to 64 bits; negative ones count from 2**64 down, as in torch.
    """
    with state.lock:
        _settle()
        state.manual_seed(int(seed) & 0xFFFFFFFFFFFFFFFF)


def get_rng_state(device: Any = "xla") -> torch.Tensor:
    """The state as a CPU `uint8` tensor of 16 bytes: seed and number of draws."""
    with state.lock:
        words = (state.seed, state.random_offset + state.trace.random_draws)
    return torch.tensor(list(b"".join(word.to_bytes(8, "little") for word in words)), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: Any = "xla") -> None:
    """Return to a state that `get_rng_state` gave; raises `ValueError` for anything else."""
    if new_state.dtype is not torch.uint8 or new_state.numel() != 16 or new_state.device.type != "cpu":
        raise ValueError(
            f"a random state is a CPU uint8 tensor of 16 bytes, not {new_state.dtype} {tuple(new_state.shape)}"
        )
    content = bytes(new_state.tolist())
    with state.lock:
        _settle()
        state.seed = int.from_bytes(content[:8], "little")
        state.random_offset = int.from_bytes(content[8:], "little")
