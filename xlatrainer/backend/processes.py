"""The processes of one computation find each other: PJRT's devices of all of them are then one set.

A launcher says in the environment how many there are, which one this is and where the first listens (`torchrun` does,
and `xlatrainer.launch`); they are joined when the device is first used. Without that a process is on its own.

May import: jax, torch, config, errors.
"""

import contextlib
import socket
from datetime import timedelta
from functools import cache

import jax
import torch.distributed as distributed

from xlatrainer import config
from xlatrainer.errors import ProcessesError

__all__ = ["is_launched", "join", "leave"]

_KEY = "xlatrainer/coordinator/"


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several."""
    return int(config.get("world_size")) > 1 and int(config.get("rank")) >= 0


@cache
def join() -> None:
    """Join the processes that were started together with this one; returns when all are there. Nothing if it is alone.

    Raises:
        ProcessesError: If the others do not come, or if JAX has been used before.
    """
    if not is_launched():
        return
    world, rank = int(config.get("world_size")), int(config.get("rank"))
    if not 0 <= rank < world:
        raise ProcessesError(f"RANK={rank} is not among WORLD_SIZE={world} processes, which are counted from 0")
    waits = int(config.get("join_seconds"))
    coordinator = _coordinator(rank, waits)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            world,
            rank,
            initialization_timeout=waits,
            heartbeat_timeout_seconds=int(config.get("heartbeat_seconds")),
        )
    except RuntimeError as error:
        raise ProcessesError(
            f"process {rank} of {world} could not join the others at {coordinator}: {error}. The device, and jax, must "
            f"not be used before all processes have started"
        ) from error


def leave() -> None:
    """Wait until all processes that were joined are done; nothing if none were.

    JAX does so when Python ends, which a process of a forkserver does not live to see.
    """
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def _coordinator(rank: int, waits: int) -> str:
    """Where process 0 listens for JAX: a free port of its machine, told through the launcher's store.

    The launcher's own port is taken by its store. Process 0 keeps one there if the launcher does not.
    """
    host, port = str(config.get("master_addr")), int(config.get("master_port"))
    if not host or port <= 0:
        raise ProcessesError(
            "WORLD_SIZE and RANK say that there are several processes, but MASTER_ADDR and MASTER_PORT do not say "
            "where the first of them listens; torchrun and xlatrainer.launch set all four"
        )
    serves = rank == 0 and str(config.get("agent_store")) != "True"
    key = _KEY + str(config.get("restart_count"))
    try:
        store = distributed.TCPStore(host, port, is_master=serves, timeout=timedelta(seconds=waits))
        if rank == 0:
            with contextlib.closing(socket.socket()) as probe:
                probe.bind(("", 0))
                free = probe.getsockname()[1]
            store.set(key, f"{host}:{free}")
        address = store.get(key).decode()
        if not serves:
            return address
        _kept.append(store)  # until all have read it, which is when they have joined
        return address
    except (RuntimeError, distributed.DistError) as error:
        raise ProcessesError(
            f"process {rank} did not reach the first one at {host}:{port} within {waits} seconds: {error}"
        ) from error


_kept: list[distributed.TCPStore] = []
