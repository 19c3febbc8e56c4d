"""A Google Cloud Storage server of the tests' own: an emulator in a process, on a port of the loopback interface."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

BUCKET = "bucket"
START_SECONDS = 60


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Start it, with the bucket `BUCKET`; gives its address, as STORAGE_EMULATOR_HOST takes it."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    address = f"http://localhost:{port}"
    options = ["start", "--host=localhost", f"--port={port}", f"--default-bucket={BUCKET}", "--in-memory", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gcp_storage_emulator", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(address, process)
        yield address
    finally:
        process.kill()
        process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{address}/", timeout=5).close()
            return
        except OSError:
            assert process.poll() is None, "the storage emulator has ended"
            assert time.monotonic() < deadline, "the storage emulator does not answer"
            time.sleep(0.05)
