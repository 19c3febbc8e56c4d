"""Compiled programs on disk: a second process compiles nothing, and no damage to a file does harm."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import xlatrainer as xla
from tests.strategies.models import batches, trained
from xlatrainer import config
from xlatrainer.backend import counters, program_cache
from xlatrainer.backend.state import state

SCRIPT = """
import json, os, torch, xlatrainer as xla
from xlatrainer.backend import counters
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 2))
strategy = os.environ["STRATEGY"]
data = [(torch.randn(4, 6), torch.randint(0, 2, (4,))) for _ in range(5)]
history = xla.Trainer(model, "adamw", metrics=["accuracy"], strategy=strategy).fit(data, epochs=2, verbose=0)
print(json.dumps([history.history["loss"], counters.snapshot()]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "programs"


def train(folder: Path, **variables: str) -> tuple[list[float], dict[str, int]]:
    environment = {**os.environ, "XLATRAINER_CACHE_DIR": str(folder), "STRATEGY": "single", **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    losses, counts = json.loads(done.stdout.splitlines()[-1])
    return losses, counts


@pytest.mark.multiprocess
def test_a_second_process_compiles_nothing(folder: Path) -> None:
    losses, first = train(folder)
    again, second = train(folder)
    assert first["UncachedCompile"] == first["PersistentCacheWrite"] == 1
    assert "UncachedCompile" not in second
    assert second["PersistentCacheHit"] == 1
    assert again == losses
    _, unchecked = train(folder, XLATRAINER_CHECK_INDICES="off")
    assert unchecked["UncachedCompile"] == 1  # another program


@pytest.mark.multiprocess
def test_nor_does_one_that_trains_on_several_devices(folder: Path) -> None:
    losses, first = train(folder, STRATEGY="hsdp")
    again, second = train(folder, STRATEGY="hsdp")
    assert first["UncachedCompile"] == first["PersistentCacheWrite"] >= 1
    assert "UncachedCompile" not in second
    assert second["PersistentCacheHit"] == first["PersistentCacheWrite"]
    assert second["Execute"] == first["Execute"]
    assert second["Replay"] == first["Replay"]
    assert again == losses


def test_a_program_of_large_values_is_kept(folder: Path) -> None:
    """XLA serializes a program only if all its temporaries are one block, which some of its options prevent."""
    x, y = torch.ones(4096, 8, device="xla"), torch.ones(8, 4096, device="xla")
    xla.sync()
    before = counters.snapshot().get("PersistentCacheHit", 0)
    with config.override(cache_dir=str(folder)):
        for _ in range(2):
            state.forget_programs()
            total = ((x @ y).tanh() @ y.T + (x @ y).sin() @ y.T).sum()
            assert total.item() == pytest.approx(4096 * 8 * 4096 * (math.tanh(8) + math.sin(8)), rel=1e-4)
    assert counters.snapshot()["PersistentCacheHit"] == before + 1


def test_several_steps_are_one_program_of_what_was_kept(folder: Path) -> None:
    with config.override(cache_dir=str(folder)):
        data = batches("bigram", 8)
        losses = []
        for _ in range(2):
            state.forget_programs()
            losses.append(trained("bigram", "fsdp", data, steps_per_execution=2)[1])
    assert losses[0] == losses[1]


def double(size: int) -> torch.Tensor:
    """A program of its own for each size, recorded as if in a new process."""
    x = torch.arange(float(size)).to("xla")
    with state.lock:
        state.forget_programs()
        state.new_trace()
    return (x * 2 + 1).cpu()


def counted(name: str, before: dict[str, int]) -> int:
    return counters.value(name) - before.get(name, 0)


def test_a_program_is_found_again(folder: Path) -> None:
    with config.override(cache_dir=str(folder)):
        before = counters.snapshot()
        first, second = double(7), double(7)
    assert counted("UncachedCompile", before) == 1
    assert counted("PersistentCacheHit", before) == 1
    assert torch.equal(first, second)
    assert [path.suffix for path in folder.iterdir()] == [".xla"]


def sorted_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sort(1)[0]


def convolved(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x.view(1, 1, *x.shape), x[:3, :3].view(1, 1, 3, 3))


@pytest.mark.parametrize(
    "operator",
    [
        sorted_rows, convolved, torch.median, torch.linalg.qr, torch.linalg.svd, torch.linalg.eigh,
        torch.linalg.cholesky_ex, torch.linalg.inv, torch.fft.fft, torch.unique, torch.rand_like, torch.bernoulli,
        torch.logdet, torch.nonzero, torch.argsort, torch.cumsum, torch.topk, torch.multinomial,
    ],
)  # fmt: skip
def test_programs_of_what_xla_writes_in_ways_of_their_own_are_found_again(operator: Any, folder: Path) -> None:
    arguments = {torch.cumsum: (0,), torch.topk: (2,), torch.multinomial: (2,)}.get(operator, ())
    rows = (torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) * 0.1 + torch.eye(12)) / 2
    with config.override(cache_dir=str(folder)):
        results = []
        for _ in range(2):
            state.forget_programs()
            xla.manual_seed(5)
            before = counters.snapshot()
            found = operator(rows.to("xla"), *arguments)
            results.append([t.cpu() for t in (found if isinstance(found, tuple) else (found,))])
            xla.sync()
    assert counted("PersistentCacheHit", before)
    assert not counted("UncachedCompile", before)
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


LINALG = """
import json, sys, torch, xlatrainer as xla
from xlatrainer.backend import counters
name, path = sys.argv[1:]
rows = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) + 3 * torch.eye(6)
matrix = (rows + rows.mT).to("xla")
if path:
    found = xla.load_stablehlo(path)(matrix)
else:
    operator = torch.linalg.solve if name == "solve" else getattr(torch.linalg, name)
    found = operator(matrix, matrix) if name == "solve" else operator(matrix)
found = found if isinstance(found, tuple) else (found,)
results = [torch.view_as_real(t).tolist() if t.is_complex() else t.tolist() for t in (t.cpu() for t in found)]
print(json.dumps([results, counters.value("UncachedCompile"), counters.value("PersistentCacheHit")]))
"""


def computed_in_a_process(folder: Path, name: str, path: str = "") -> Any:
    environment = {**os.environ, "XLATRAINER_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", LINALG, name, path], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["inv", "cholesky", "qr", "svd", "eigh", "eig", "solve", "lu_factor", "matrix_exp"])
def test_a_process_that_lowered_nothing_finds_the_library_that_a_program_calls(name: str, folder: Path) -> None:
    """LAPACK's functions have no address before jaxlib is asked for them: the process died of a segmentation fault."""
    expected, compiled, _ = computed_in_a_process(folder, name)
    assert compiled
    again, compiled, hits = computed_in_a_process(folder, name)
    assert hits
    assert not compiled
    assert again == expected


@pytest.mark.multiprocess
def test_a_program_in_a_file_of_stablehlo_finds_it_too(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "qr.stablehlo"
    xla.save_stablehlo(torch.linalg.qr, (torch.eye(6),), path)
    assert computed_in_a_process(folder, "", str(path))[0] == computed_in_a_process(folder, "qr")[0]


def test_what_xla_cannot_write_is_reported_and_compiled_by_each_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(compiled: Any) -> bytes:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: a part of it is not serializable")

    monkeypatch.setattr(program_cache, "serialize_executable", refused)
    with config.override(cache_dir=str(folder)):
        assert double(3).tolist() == [1.0, 3.0, 5.0]
    assert not folder.exists() or not list(folder.iterdir())
    assert "XLA cannot write it" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign", "header"])
def test_a_damaged_file_is_replaced(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    with config.override(cache_dir=str(folder)):
        expected = double(8)
        (path,) = folder.iterdir()
        content = path.read_bytes()
        path.write_bytes(
            {
                "cut": content[:-10],
                "flipped": content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
                "empty": b"",
                "foreign": b"{}\n" + content,
                "header": b"\xff" + content,
            }[damage]
        )
        before = counters.snapshot()
        assert torch.equal(double(8), expected)
        assert counted("UncachedCompile", before) == counted("PersistentCacheDamaged", before) == 1
        assert "is damaged and is made anew" in caplog.text
        before = counters.snapshot()
        assert torch.equal(double(8), expected)
        assert counted("PersistentCacheHit", before) == 1


def test_a_check_survives(folder: Path) -> None:
    table = torch.ones(9, 2, device="xla")

    def look_up(position: int) -> torch.Tensor:
        index = torch.tensor([position]).to("xla")
        xla.sync()
        with state.lock:
            state.forget_programs()
            state.new_trace()
        return torch.nn.functional.embedding(index, table).cpu()

    with config.override(cache_dir=str(folder)):
        look_up(3)
        before = counters.snapshot()
        with pytest.raises(IndexError, match="9"):
            look_up(9)
        assert counted("PersistentCacheHit", before) == 1


def test_donated_buffers_are_given_away(folder: Path) -> None:
    with config.override(cache_dir=str(folder)):
        for _ in range(2):
            weight = torch.ones(11, device="xla")
            xla.sync()
            with state.lock:
                state.forget_programs()
                state.new_trace()
            buffer = weight.untyped_storage()._xla.value.buffer
            weight.add_(1)
            xla.sync()
            assert buffer.is_deleted()
            assert weight.tolist() == [2.0] * 11


def test_an_interruption_while_it_is_kept_loses_no_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    state.forget_programs()
    held = torch.ones(3, device="xla")
    xla.sync()
    monkeypatch.setattr(program_cache, "store", interrupted)
    with config.override(cache_dir=str(folder)):
        result = held.mul_(6).mul(7)
        with pytest.raises(KeyboardInterrupt):
            xla.sync()
    assert held.tolist() == [6.0] * 3  # written over in place
    assert result.tolist() == [42.0] * 3


def test_reading_only_writes_nothing(folder: Path) -> None:
    with config.override(cache_dir=str(folder), cache_readonly="on"):
        double(10)
    assert not folder.exists()


def test_the_size_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with config.override(cache_dir=str(folder)):
        for size in (12, 13, 14):
            double(size)
            for path in folder.iterdir():
                os.utime(path, (1, 1)) if size < 14 else None
        with config.override(cache_megabytes=0):
            program_cache._bound_size(folder)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    with config.override(cache_dir=str(tmp_path / "file" / "programs")):
        assert double(15).tolist() == [2.0 * i + 1 for i in range(15)]
    assert "compiled programs are not kept" in caplog.text
