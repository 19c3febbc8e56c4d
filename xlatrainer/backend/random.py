"""The device's random state: a seed and the number of draws since. The key of a draw depends on these two alone.

May import: state, executor.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.state import state

__all__ = [
    "fork_rng",
    "get_rng_state",
    "get_rng_state_tensor",
    "manual_seed",
    "set_rng_state",
    "set_rng_state_tensor",
]


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


def get_rng_state(device: torch.device | str | None = None) -> int:
    """The device's random state as an integer: the seed, and the number of draws since times 2**64.

    Args:
        device: the one device; default None.
    """
    with state.lock:
        return state.seed | (state.random_offset + state.trace.random_draws) << 64


def set_rng_state(seed: int, device: torch.device | str | None = None) -> None:
    """Return to a state that `get_rng_state` gave, or begin anew with a seed.

    Args:
        seed: a state, or a seed of up to 64 bits, which is the state after `manual_seed(seed)`.
        device: the one device; default None.

    Raises:
        TypeError: for anything but an int.
        ValueError: for a negative one, or one of more than 128 bits.
    """
    if not isinstance(seed, int):
        raise TypeError(f"a random state is an int, not {seed!r}")
    if not 0 <= seed < 2**128:
        raise ValueError(f"a random state is at least 0 and below 2**128, not {seed}")
    with state.lock:
        _settle()
        state.random_offset, state.seed = divmod(seed, 2**64)


@contextlib.contextmanager
def fork_rng(enabled: bool = True) -> Iterator[None]:
    """A block after which the device's random numbers go on as if it had drawn none.

    Args:
        enabled: False does nothing, as in `torch.random.fork_rng`. Default True.
    """
    before = get_rng_state()
    try:
        yield
    finally:
        if enabled:
            set_rng_state(before)


def get_rng_state_tensor(device: Any = "xla") -> torch.Tensor:
    """The state as a CPU `uint8` tensor of 16 bytes: seed and number of draws."""
    return torch.tensor(list(get_rng_state().to_bytes(16, "little")), dtype=torch.uint8)


def set_rng_state_tensor(new_state: torch.Tensor, device: Any = "xla") -> None:
    """Return to a state that `get_rng_state_tensor` gave; raises `ValueError` for anything else."""
    if new_state.dtype is not torch.uint8 or new_state.numel() != 16 or new_state.device.type != "cpu":
        raise ValueError(
            f"a random state is a CPU uint8 tensor of 16 bytes, not {new_state.dtype} {tuple(new_state.shape)}"
        )
    set_rng_state(int.from_bytes(bytes(new_state.tolist()), "little"))
