"""Which processes there are, and what they say to each other outside of programs. May import `backend`.

All of this must be called by every process, in the same order.
"""

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils
from torch import Tensor

from xlatrainer.backend import runtime

__all__ = ["barrier", "from_first", "is_first", "process_count", "process_index"]


def process_count() -> int:
    """How many processes form one computation; 1 for a process on its own."""
    runtime.local_devices()  # joins them
    return jax.process_count()


def process_index() -> int:
    """This process's number among them, from 0."""
    runtime.local_devices()
    return jax.process_index()


def is_first() -> bool:
    """Whether this is process 0, which speaks and writes for all."""
    return process_index() == 0


def barrier(name: str) -> None:
    """Wait until all processes have come here; `name` is compared, so that none waits somewhere else."""
    if process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_first(tensor: Tensor) -> Tensor:
    """A CPU tensor's contents in process 0; each process gives one of the same shape and dtype."""
    if process_count() == 1:
        return tensor
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    sent = np.array(multihost_utils.broadcast_one_to_all(flat.numpy()))
    return torch.from_numpy(sent).view(tensor.dtype).view(tensor.shape)
