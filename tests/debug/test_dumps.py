"""Graphs as text: of a pending tensor, and of everything that runs, in files."""

import re
from pathlib import Path

import pytest
import torch

import xlatrainer as xla
from xlatrainer import config, debug
from xlatrainer.backend import counters
from xlatrainer.backend.state import state
from xlatrainer.errors import ExecutionError


def pending() -> torch.Tensor:
    xla.sync()
    source = torch.ones(2, 3).to("xla")
    (source - 7).sin()  # of no use to the result
    return (source + 1).exp()


def test_the_graph_of_a_pending_tensor() -> None:
    result = pending()
    before = counters.value("Execute")
    lines = debug.graph(result).splitlines()
    assert counters.value("Execute") == before
    assert [re.sub(r"  #.*|%\d+", "", line) for line in lines] == [
        " = xla::device_data() : float32[2,3]",
        " = aten::add.Tensor() {., int} : float32[2,3]",
        " = aten::exp() : float32[2,3]",
    ]
    assert all(f"{__file__}:" in line for line in lines[1:])


def test_the_graph_for_graphviz() -> None:
    text = debug.graph(pending(), "dot")
    assert text.startswith("digraph G {\n")
    assert text.endswith("}\n")
    assert len(re.findall(r"n\d \[shape=", text)) == 3
    assert re.findall(r"n(\d) -> n(\d)", text) == [("0", "1"), ("1", "2")]
    assert "aten::exp" in text
    assert "sin" not in text


def test_a_computed_tensor_is_data() -> None:
    result = pending()
    xla.sync()
    assert debug.graph(result).startswith("%")
    assert "xla::device_data() : float32[2,3]" in debug.graph(result)
    assert "exp" not in debug.graph(result)


def test_the_program() -> None:
    text = debug.hlo(pending())
    assert text.startswith("HloModule")
    assert "exponential" in text
    assert "sine" not in text
    assert "stablehlo.exponential" in debug.hlo(pending(), "stablehlo")


def test_the_program_names_the_users_lines_if_asked() -> None:
    assert __file__ not in debug.hlo(pending())
    with config.override(hlo_debug="1"):
        assert f"aten::exp at {__file__}" in debug.hlo(pending())


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Softsign()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.nn.Sequential(torch.nn.Tanh())(x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).erf()


def test_the_program_names_modules_and_blocks_if_asked() -> None:
    model = Model()

    def program(rows: int) -> str:
        """Of another shape in each call: what was recorded without names keeps none."""
        with xla.profiler.Trace("evaluation"):
            return debug.hlo(model(torch.ones(rows, 41).to("xla")) + 1)

    assert "evaluation" not in program(2)
    with config.override(hlo_debug="1"):
        text = program(3)
    for name in (
        "evaluation/Model/block/layers.1/aten::abs at",
        "evaluation/Model/block/Sequential/0/aten::tanh at",
        "evaluation/Model/aten::erf at",
        "evaluation/aten::add.Tensor at",
    ):
        assert name in text
    assert state.scopes == []


@pytest.mark.parametrize("call", [debug.graph, debug.hlo])
def test_wrong_arguments(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match="not 'png'"):
        call(pending(), "png")
    with pytest.raises(ValueError, match="this one is on cpu"):
        call(torch.ones(2))


@pytest.mark.parametrize(
    ("form", "marks"),
    [
        ("text", ["IR {", "aten::exp"]),
        ("dot", ["digraph G {", "aten::exp"]),
        ("hlo", ["HloModule", "exponential"]),
        ("stablehlo", ["stablehlo.exponential"]),
    ],
)
def test_every_graph_that_runs_is_appended(form: str, marks: list[str], tmp_path: Path) -> None:
    with config.override(save_tensors_file=str(tmp_path / "graphs"), save_tensors_format=form):
        pending().cpu()
        first = (tmp_path / "graphs.0").read_text()
        pending().cpu()
    assert all(mark in first for mark in [*marks, "## BEGIN_GRAPH", "## END_GRAPH"])
    assert (tmp_path / "graphs.0").read_text() == first * 2 or form == "text"  # text has the lines, which differ
    assert (tmp_path / "graphs.0").read_text().count("## BEGIN_GRAPH") == 2


def test_replayed_steps_are_appended_too(tmp_path: Path) -> None:
    step = xla.compile(lambda x: x.erfc() * 2)
    x = torch.ones(5).to("xla")
    with config.override(save_tensors_file=str(tmp_path / "graphs")):
        for _ in range(4):
            step(x)
    assert (tmp_path / "graphs.0").read_text().count("aten::erfc") == 4


def test_several_steps_in_one_program_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = xla.compile(lambda x: x.erfc() * 3)
    batches = [(torch.ones(5).to("xla"),) for _ in range(3)]
    for batch in batches:
        step(*batch)
    monkeypatch.setenv("PT_XLA_DEBUG_LEVEL", "2")
    monkeypatch.setenv("PT_XLA_DEBUG_FILE", str(tmp_path / "analysis"))
    before = counters.snapshot()
    with config.override(save_tensors_file=str(tmp_path / "graphs")):
        for _ in range(2):
            step.step.many(batches)
    text = (tmp_path / "analysis").read_text()
    assert counters.value("Execute") - before["Execute"] == 2
    assert (tmp_path / "graphs.0").read_text().count("aten::erfc") == 2
    assert text.count("Execution Cause") == text.count("  3 steps of a compiled function are replayed") == 2
    assert text.count("Compilation Cause") == text.count("  3 steps become one program") == 1
    assert debug.explain_recompiles(last=1)[0].cause.startswith("3 steps become one program")


def test_the_whole_stack_of_an_operator_if_asked() -> None:
    with config.override(ir_debug="1"):
        text = debug.graph(torch.ones(3).to("xla").erfinv().lgamma())
    assert "in test_the_whole_stack_of_an_operator_if_asked" in text
    assert text.count(" <- ") > 2  # pytest's frames are a user's to us


def fail() -> None:
    """Run a program that needs more memory than there is."""
    huge = torch.ones(2**38, device="xla")
    (huge * 2 + 1).sort()[0].sum().item()


@pytest.mark.parametrize("shown", ["0", "1"])
def test_a_program_that_fails_is_written(shown: str, tmp_path: Path) -> None:
    match = "HloModule" if shown == "1" else "its HLO is in .*failed.hlo"
    settings = {"save_hlo_file": str(tmp_path / "failed.hlo"), "dump_hlo_graph": shown}
    with config.override(**settings), pytest.raises(ExecutionError, match=match):
        fail()
    assert (tmp_path / "failed.hlo").read_text().startswith("HloModule")
    with pytest.raises(ExecutionError) as plain:
        fail()
    assert "HloModule" not in str(plain.value)
