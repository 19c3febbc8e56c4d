"""Profiles are written where TensorBoard looks for them, with the names that were given."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import torch

import xlatrainer as xla


def events(folder: Path) -> set[str]:
    """The names in the one profile below a folder."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}


def test_a_block_with_steps(tmp_path: Path) -> None:
    x = torch.ones(64, 64).to("xla")
    with xla.profiler.trace(tmp_path) as folder:
        for index in range(3):
            with xla.profiler.StepTrace("my_step", step_num=index), xla.profiler.Trace("my_product"):
                x = x @ x / 64
                xla.sync()
        x = x + 1  # pending: runs before the profile ends
    assert folder == tmp_path
    assert {"my_step", "my_product"} <= events(tmp_path)
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


def test_from_here_to_there(tmp_path: Path) -> None:
    xla.profiler.start_trace(tmp_path)
    with xla.profiler.Trace("only_this"):
        torch.ones(3).to("xla").exp().cpu()
    xla.profiler.stop_trace()
    with xla.profiler.Trace("not_this"):
        pass
    assert "only_this" in events(tmp_path)
    assert "not_this" not in events(tmp_path)


def test_a_server_listens_while_somebody_holds_it() -> None:
    """What TensorBoard connects to; in a process of its own, since one has one server at most."""
    code = (
        "import socket, xlatrainer as xla\n"
        "with socket.socket() as free:\n"
        "    free.bind(('localhost', 0))\n"
        "    port = free.getsockname()[1]\n"
        "server = xla.profiler.start_server(port)\n"
        "socket.create_connection(('localhost', port), timeout=60).close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
