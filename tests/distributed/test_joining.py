"""Processes join: how long each waits for the others, and after how long a silent one counts as dead."""

import socket
import sys
from typing import Any

import jax
import pytest
from torch.distributed import TCPStore

from tests.distributed import scripts
from tests.distributed.launching import launch_soon
from xlatrainer.backend import processes
from xlatrainer.errors import ProcessesError


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the first of two processes would listen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return f"127.0.0.1:{port}"


def join() -> None:
    processes.join.__wrapped__()


def test_nobody_is_there(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("XLATRAINER_JOIN_SECONDS", "1")
    with pytest.raises(ProcessesError, match=rf"process 1 did not reach the first one at {address} within 1 seconds"):
        join()


@pytest.mark.parametrize("launcher_serves", [False, True])
def test_what_jax_is_told(address: str, launcher_serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *ranks, **options: given.update(options, ranks=ranks))
    kept: list[TCPStore] = []
    monkeypatch.setattr(processes, "_kept", kept)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("XLATRAINER_JOIN_SECONDS", "7")
    monkeypatch.setenv("XLATRAINER_HEARTBEAT_SECONDS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    stores = kept
    if launcher_serves:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        stores = [TCPStore("127.0.0.1", int(address.partition(":")[2]), is_master=True, wait_for_workers=False)]
    before = jax.config.jax_cpu_collectives_implementation
    try:
        join()
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)
    assert given["ranks"][1:] == (2, 0)
    assert given["ranks"][0] == stores[0].get("xlatrainer/coordinator/4").decode()  # of this start of the processes
    assert len(kept) == (not launcher_serves)
    assert (given["initialization_timeout"], given["heartbeat_timeout_seconds"]) == (7, 3)


@pytest.mark.multiprocess
def test_a_silent_process_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["xlatrainer.distributed.launch"], "_GRACE", 0.1)  # a stopped process never ends
    with pytest.raises(ProcessesError, match=r"process 0 of 2 ended by SIG"):
        launch_soon(scripts.fall_silent)
