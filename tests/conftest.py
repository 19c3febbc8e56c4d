"""What holds for every test: it starts from the same seeds and leaves the process as it found it."""

import contextlib
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import gcsfs.core
import numpy as np
import pytest
import torch

from tests import gcs

SEED = 0
GRACE_SECONDS = 2.0  # for threads and processes that are ending on their own

# Variables that others set for the rest of the process.
LASTING_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest names the running test in it",
    "TF_CPP_MIN_LOG_LEVEL": "jax, when it is imported",
    "TPU_SKIP_MDS_QUERY": "jax, when it is imported on a machine without a TPU",
    "TORCHINDUCTOR_CACHE_DIR": "torch, when its compiler is loaded, which the first optimizer does",
}

# Threads that live as long as the process by design, by the start of their name.
LASTING_THREADS = {
    "Dummy-": "Python's name for a native thread that ran Python code once, as autograd's backward threads do",
    "Otel": "OpenTelemetry's exporters, which wandb starts once in a process",
    "fsspecIO": "fsspec's one event loop, started by the first remote file system",
    "asyncio_": "the threads of that loop",
    "gcsfs-deferred-close": "gcsfs's own, started by the first file",
}
# tqdm's monitor carries no name of its own; its class does.
LASTING_THREAD_TYPES = {"TMonitor": "tqdm's monitor, one a process, started by the first progress bar"}

# Child processes that live as long as the process by design, by a part of their command line.
LASTING_CHILDREN = {
    "multiprocessing.resource_tracker": "started by multiprocessing with the first shared object",
    "multiprocessing.forkserver": "started by multiprocessing with the first forkserver process",
    "gcp_storage_emulator": "the tests' storage server, ended with the session",
}


def pytest_configure(config: pytest.Config) -> None:
    """Keep the suite on the CPU unless the GPU tests were asked for, and one thread to a test worker."""
    if not _wants_gpu(config):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Tests count compilations; those of the cache of compiled programs give it a folder of their own.
    os.environ.setdefault("XLATRAINER_CACHE_DIR", "off")
    # Several devices for the tests of meshes; the others run on the first of them. Read when XLA makes its devices.
    os.environ.setdefault("CPU_NUM_DEVICES", "8")
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _wants_gpu(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU; run `pytest -m gpu`"))


@pytest.fixture(scope="session")
def _gcs_server() -> Iterator[str]:
    with gcs.server() as address:
        yield address


@pytest.fixture
def bucket(_gcs_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder, new to each test, in a bucket of a Google Cloud Storage server that was started for this."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", _gcs_server)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    gcsfs.core.GCSFileSystem.clear_instance_cache()  # one that speaks to another address
    return f"gs://{gcs.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test sees the same random numbers, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _on_one_device() -> Iterator[None]:
    """Programs run on the first device again once a test has run some on a mesh."""
    yield
    mesh = sys.modules.get("xlatrainer.distributed.mesh")
    if mesh is not None and mesh.is_spmd():
        mesh.use_home(None)


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    before = _environment()
    yield
    after = _environment()
    if after == before:
        return
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    pytest.fail(f"environment variables left changed: {', '.join(changed)} (set them with monkeypatch.setenv)")


@pytest.fixture(autouse=True)
def _no_leaked_torch_settings() -> Iterator[None]:
    before = _torch_settings()
    yield
    after = _torch_settings()
    assert after == before, "torch's global settings left changed"


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    leaked = _after_grace(lambda: [t for t in threading.enumerate() if t not in before and not _is_lasting(t)])
    assert not leaked, f"threads left running: {leaked}"


@pytest.fixture(autouse=True)
def _no_leaked_children() -> Iterator[None]:
    before = _children().keys()
    yield
    leaked = _after_grace(lambda: [f"{pid}: {line}" for pid, line in _children().items() if pid not in before])
    assert not leaked, f"child processes left running: {leaked}"


def _wants_gpu(config: pytest.Config) -> bool:
    expression = config.getoption("markexpr")
    return "gpu" in expression and "not gpu" not in expression


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LASTING_VARIABLES}


def _torch_settings() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def _is_lasting(thread: threading.Thread) -> bool:
    return type(thread).__name__ in LASTING_THREAD_TYPES or thread.name.startswith(tuple(LASTING_THREADS))


def _children() -> dict[int, str]:
    """Command lines of this process's living children by pid."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}  # none at all: the usual case, and the only cheap question
    children: dict[int, str] = {}
    for pid in _pids_of_children():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            line = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            # A process that has ended but was not waited for has no command line.
            if line and not any(part in line for part in LASTING_CHILDREN):
                children[int(pid)] = line
    return children


def _pids_of_children() -> list[str]:
    pids = []
    for task in Path("/proc/self/task").iterdir():  # a child is that of the thread that started it
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pids += (task / "children").read_text().split()
    return pids


def _after_grace(leaked: Callable[[], list[object]]) -> list[object]:
    """What `leaked` still returns once things that were ending had their time to end."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (found := leaked()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
