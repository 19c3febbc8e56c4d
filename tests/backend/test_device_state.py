"""Random state as an integer, memory, and the folder of compiled programs chosen by the program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xlatrainer as xla
from xlatrainer import config
from xlatrainer.backend import counters


def draw() -> list[float]:
    return torch.rand(3, device="xla").tolist()


def test_the_random_state_is_an_integer() -> None:
    xla.set_rng_state(1234)
    first = draw()
    later = xla.get_rng_state()
    assert later != 1234
    second = draw()
    assert first != second
    xla.set_rng_state(later)
    assert draw() == second
    xla.set_rng_state(1234)
    assert draw() == first
    xla.manual_seed(1234)
    assert (xla.get_rng_state(), draw()) == (1234, first)


def test_a_pending_draw_counts() -> None:
    xla.set_rng_state(7)
    values = torch.rand(3, device="xla")
    assert xla.get_rng_state() == 7 | 1 << 64
    xla.set_rng_state(7)
    assert draw() == values.tolist()


def test_a_block_that_leaves_no_trace() -> None:
    xla.set_rng_state(5)
    with xla.fork_rng():
        xla.manual_seed(9)
        draw()
    assert xla.get_rng_state() == 5
    with xla.fork_rng(enabled=False):
        draw()
    assert xla.get_rng_state() != 5
    with pytest.raises(KeyError), xla.fork_rng():
        {}[xla.manual_seed(9)]
    assert xla.get_rng_state() & (2**64 - 1) == 5


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [(-1, ValueError, "at least 0"), (2**128, ValueError, "below 2\\*\\*128"), ("1", TypeError, "an int, not '1'")],
)
def test_wrong_states(state: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        xla.set_rng_state(state)  # type: ignore[arg-type]


def test_recomputed_activations_have_the_same_dropout() -> None:
    def gradients(recompute: bool) -> list[Tensor]:
        xla.manual_seed(11)
        torch.manual_seed(11)
        layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2)).to("xla")
        x = torch.linspace(-1, 1, 32).reshape(4, 8).to("xla")
        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        out.square().sum().backward()
        return [parameter.grad.cpu() for parameter in layer.parameters() if parameter.grad is not None]

    for expected, actual in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(actual, expected)


def test_memory() -> None:
    before = counters.value("Execute")
    info = xla.get_memory_info()
    assert counters.value("Execute") == before
    assert set(info) == {"bytes_used", "bytes_limit", "peak_bytes_used", "kb_total", "kb_free"}
    assert 10**7 < info["bytes_used"] <= info["peak_bytes_used"] <= info["bytes_limit"]
    assert info["kb_total"] == info["bytes_limit"] // 1024
    assert info["kb_free"] == (info["bytes_limit"] - info["bytes_used"]) // 1024
    assert xla.get_memory_info(torch.device("xla", 0)).keys() == info.keys()


PROGRAM = """
import sys, torch, xlatrainer as xla
{setting}
print((torch.ones(3).to("xla") * 2).sum().item(), xla.counters.value("UncachedCompile"))
"""


def run(setting: str = "", **environment: str) -> str:
    """What a process prints that computes something, with a setting: the result, and how much it compiled."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setting=setting)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**{k: v for k, v in os.environ.items() if k != "XLATRAINER_CACHE_DIR"}, **environment},
    )
    return done.stdout.strip()


@pytest.mark.multiprocess
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    own, readonly = tmp_path / "programs", f"xla.initialize_cache({str(tmp_path / 'programs')!r}, readonly=True)"
    assert run(readonly) == "6.0 1"
    assert not own.exists()
    assert run(f"xla.initialize_cache({str(own)!r})") == "6.0 1"
    kept = {path: path.read_bytes() for path in own.iterdir()}
    assert kept
    assert run(readonly) == "6.0 0"
    assert run(XLA_PERSISTENT_CACHE_PATH=str(own), XLA_PERSISTENT_CACHE_READ_ONLY="1") == "6.0 0"
    for path in kept:
        path.write_bytes(b"damaged")
    assert run(readonly) == "6.0 1"
    assert run(XLA_PERSISTENT_CACHE_PATH=str(own)) == "6.0 1"
    assert {path: path.read_bytes() for path in own.iterdir()}.keys() == kept.keys()
    assert run(XLA_PERSISTENT_CACHE_PATH=str(own)) == "6.0 0"


def test_other_names_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_READ_ONLY", "1")
    assert config.get("cache_readonly") == "on"
    monkeypatch.setenv("XLATRAINER_CACHE_READONLY", "off")
    assert config.get("cache_readonly") == "off"
    monkeypatch.delenv("XLATRAINER_CACHE_READONLY")
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_READ_ONLY", "perhaps")
    with pytest.raises(ValueError, match="XLA_PERSISTENT_CACHE_READ_ONLY='perhaps': accepted are '1', '0'"):
        config.get("cache_readonly")


@pytest.mark.parametrize("name", sorted(config.SETTINGS))
def test_an_unknown_value_of_a_variable_names_the_known_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = config.SETTINGS[name]
    monkeypatch.setenv(setting.variable, "neither fish nor fowl")
    if setting.accepted:
        with pytest.raises(ValueError, match=f"{setting.variable}='neither fish nor fowl': accepted are '"):
            config.get(name)
    elif not isinstance(setting.default, str):
        with pytest.raises(ValueError, match=f"{setting.variable}='neither fish nor fowl' is no "):
            config.get(name)
    else:
        assert config.get(name) == "neither fish nor fowl"


def test_every_sync_waits_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    monkeypatch.setattr("xlatrainer.backend.device.wait_device_ops", lambda: waits.append(True))
    xla.sync()
    assert waits == []
    monkeypatch.setenv("XLA_SYNC_WAIT", "1")
    xla.sync()
    assert waits == [True]


@pytest.mark.multiprocess
@pytest.mark.parametrize("variable", ["XLA_GET_TENSORS_OPBYOP", "XLA_SYNC_TENSORS_OPBYOP"])
def test_each_operator_is_a_program_if_asked(variable: str) -> None:
    program = (
        "import torch, xlatrainer as xla; x = torch.ones(3).to('xla'); y = ((x + 1) * 2).exp().cpu();"
        "print(xla.counters.value('Execute'), xla.is_eager_mode())"
    )
    environment = {**os.environ, variable: "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True, env=environment
    )
    assert done.stdout == "3 True\n"
