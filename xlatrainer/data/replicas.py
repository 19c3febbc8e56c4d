"""Which of several processes this one is, for what shares files among them. Asks no device."""

from __future__ import annotations

import torch

from xlatrainer import config
from xlatrainer.backend.processes import is_launched

__all__ = ["is_writer", "replica"]


def replica() -> tuple[int, int]:
    """This process's number, and how many there are: of `torch.distributed` if it is initialized, or the launcher's."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return (int(config.get("rank")), int(config.get("world_size"))) if is_launched() else (0, 1)


def is_writer(master_only: bool, global_master: bool) -> bool:
    """Whether this process writes a file: each of them, the first of each machine (LOCAL_RANK), or the first of all."""
    rank, world_size = replica()
    if not master_only or world_size == 1:
        return True
    local_rank = int(config.get("local_rank"))
    return rank == 0 if global_master or local_rank < 0 else local_rank == 0
