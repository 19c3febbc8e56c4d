"""Profiles are written where TensorBoard looks for them, with the names that were given."""

import gzip
import json
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
