"""What `PT_XLA_DEBUG` and `explain_recompiles` say of compilations and executions."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

import xlatrainer as xla
from xlatrainer import config, debug
from xlatrainer.backend import measurements
from xlatrainer.debug.analysis import debug_level, findings

WIDTHS = count(23)


@pytest.fixture
def width() -> Iterator[int]:
    """A size of which nothing is compiled yet."""
    xla.sync()
    debug.clear_all()
    yield next(WIDTHS)
    debug.clear_all()


def test_a_shape(width: int) -> None:
    for rows in (2, 3):
        result = torch.ones(rows, width).to("xla").erf().sum()
        xla.sync()
    found = debug.explain_recompiles(last=1)[0]
    assert result.item() > 0
    assert found.cause == "sync"
    assert f"{__file__}:" in found.line
    assert found.change is not None
    assert found.change.kind == "shape"
    assert found.change.text == (
        f"input 0 of the graph is float32[3,{width}], was float32[2,{width}]: dimension 0 was 2, is 3, "
        "taken by aten::erf"
    )
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in test_a_shape", found.change.line)
    assert (found.operators, found.inputs, found.outputs) == (2, 1, 1)
    assert set(found.bytes) == {"arguments", "outputs", "donated", "temporaries", "code"}
    assert found.bytes["arguments"] == 3 * width * 4


def test_a_dtype(width: int) -> None:
    for dtype in (torch.float32, torch.float64):
        torch.ones(width, dtype=dtype).to("xla").erf().cpu()
    change = debug.explain_recompiles(last=1)[0].change
    assert change is not None
    assert (change.kind, f"is float64[{width}], was float32[{width}]" in change.text) == ("dtype", True)


def test_a_constant(width: int) -> None:
    source = torch.ones(2, width).to("xla")
    for dim in (0, 1):
        source.erf().cumsum(dim).cpu()
    change = debug.explain_recompiles(last=1)[0].change
    assert change is not None
    assert change.kind == "constant"
    assert change.text == "aten::cumsum(., 1), where it was aten::cumsum(., 0)"


def test_an_operator(width: int) -> None:
    source = torch.ones(width).to("xla")
    for name in ("sin", "cos"):
        getattr(source.erf(), name)().cpu()
    change = debug.explain_recompiles(last=1)[0].change
    assert change is not None
    assert change.kind == "operator"
    assert change.text.startswith("aten::cos, where it was aten::sin at ")


def test_more_operators(width: int) -> None:
    source = torch.ones(width).to("xla")
    source.erf().sin().cpu()
    source.erf().sin().cos().tan().cpu()
    change = debug.explain_recompiles(last=1)[0].change
    assert change is not None
    assert (change.kind, change.text) == ("length", "2 more operators than before, the first of them aten::cos")


def test_the_cause(width: int) -> None:
    source = torch.ones(width).to("xla")
    source.erf().tolist()
    assert debug.explain_recompiles(last=1)[0].cause == "a value is read"
    xla.compile(lambda x: x.erf().erf())(source)
    assert debug.explain_recompiles(last=1)[0].cause == "a compiled function ends"


@pytest.mark.parametrize(
    ("settings", "level"),
    [({}, 0), ({"debug": "1"}, 100), ({"debug_level": 1}, 1), ({"debug": "1", "debug_level": 2}, 2)],
)
def test_levels(settings: dict[str, object], level: int) -> None:
    with config.override(**settings):
        assert debug_level() == level


def test_the_first_level_tells_of_compilations_alone(width: int, tmp_path: Path) -> None:
    text = {}
    for level in (1, 2):
        source = torch.ones(level, width).to("xla")
        with config.override(debug_level=level, debug_file=str(tmp_path / str(level))):
            for _ in range(3):
                source.erf().cpu()
        text[level] = (tmp_path / str(level)).read_text()
    assert [text[level].count("Compilation Cause") for level in (1, 2)] == [1, 1]
    assert [text[level].count("Execution Cause") for level in (1, 2)] == [0, 3]
    assert "  Number of Graph Inputs: 1\n" in text[1]
    assert re.search(r"Post Compilation Analysis: arguments: \d+\.\d{6} GB \(\d+ bytes\)\n", text[1])
    assert f"{__file__}:" in text[1]


SCRIPT = """
import torch, xlatrainer as xla
model = torch.nn.Linear(3, 2).to("xla")
for step in range(22):
    rows = step + 1 if {changing} else 4
    loss = model(torch.ones(rows, 3).to("xla")).sum()  # the line that is named
    if {reading}:
        loss.item()
    xla.sync()
if {falling_back}:
    torch.linalg.ldl_factor(torch.eye(3, device="xla"))
"""


def run(tmp_path: Path, changing: bool = False, reading: bool = False, falling_back: bool = False) -> str:
    """What a script with these habits writes to stderr under PT_XLA_DEBUG."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(changing=changing, reading=reading, falling_back=falling_back))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "PT_XLA_DEBUG": "1"},
    )
    return done.stderr


@pytest.mark.multiprocess
def test_a_script_that_changes_a_shape_in_every_step_is_told_so(tmp_path: Path) -> None:
    text = run(tmp_path, changing=True)
    assert "pt-xla-profiler: CompileTime too frequent: 12 counts during 12 steps\n" in text
    line = f"{tmp_path / 'script.py'}:6"
    assert f"float32[22,3], was float32[21,3]: dimension 0 was 21, is 22, taken by aten::addmm ({line} in" in text
    assert "TransferFromDeviceTime too frequent" not in text


@pytest.mark.multiprocess
def test_a_steady_script_is_not_blamed(tmp_path: Path) -> None:
    text = run(tmp_path)
    assert text.startswith("pt-xla-profiler: debugging is on (PT_XLA_DEBUG)")
    assert "too frequent" not in text
    assert "not lowered" not in text


@pytest.mark.multiprocess
def test_reads_and_operators_of_the_cpu(tmp_path: Path) -> None:
    text = run(tmp_path, reading=True, falling_back=True)
    # a loss in each step, the operator's operand, and one result to show its error by
    assert "pt-xla-profiler: TransferFromDeviceTime too frequent: 14 counts during 12 steps\n" in text
    assert "pt-xla-profiler: Op(s) not lowered: aten::linalg_ldl_factor_ex\n" in text


def test_slow_programs_are_named(width: int) -> None:
    measurements.record("CompileTime", 301.5)
    assert list(findings(0, {})) == ["CompileTime too slow: longest instance took 05m01s500ms0.000us"]


def test_the_metrics_file_gets_a_report_a_step(width: int, tmp_path: Path) -> None:
    with config.override(metrics_file=str(tmp_path / "metrics")):
        for _ in range(3):
            torch.ones(width).to("xla").erf()
            xla.sync()
    steps = re.findall(r"\[MetricsData; step=(\d+)\]\n", (tmp_path / "metrics").read_text())
    assert [int(step) - int(steps[0]) for step in steps] == [0, 1, 2]
    assert (tmp_path / "metrics").read_text().count("Counter: MarkStep") == 3
