"""Copies to and from the device, and what surrounds them."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import xlatrainer as xla
from xlatrainer import config
from xlatrainer.backend import runtime


def test_a_copy_to_the_device_is_one_copy_and_independent() -> None:
    source = torch.randn(1000)
    copied = runtime._private_copy(source.numpy())
    assert copied.ctypes.data % 64 == 0
    buffer = runtime.to_device(source)
    expected = source.clone()
    source.zero_()
    np.testing.assert_array_equal(np.asarray(buffer), expected.numpy())


_ZEROS = """
import resource, pathlib, torch, xlatrainer

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

zeros = torch.zeros(()).expand(8192, 2048)
torch.ones(()).expand(2).to("xla").cpu()  # for the device to be there
before = resident()
state = zeros.to("xla")
print(resident() - before)
"""


@pytest.mark.multiprocess
def test_zeros_take_no_memory_until_a_program_needs_them() -> None:
    """In a process of its own: memory that other tests have freed would be cleared first, and so be touched."""
    command = [sys.executable, "-W", "ignore", "-c", _ZEROS]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert int(grown) < 2**20  # of 64 MiB


def test_zeros_are_a_copy_like_others() -> None:
    zeros = torch.zeros(()).expand(64, 32)
    state = zeros.to("xla")
    assert state.stride() == (32, 1)
    state[0] += 1.0
    assert state.sum().item() == 32
    assert not zeros.any()
    for other in (torch.tensor(-0.0), torch.tensor(2)):
        assert torch.equal(other.expand(3, 4).to("xla").cpu().signbit(), other.expand(3, 4).signbit())


def test_what_lies_scattered_or_lazily_conjugated_is_copied_as_it_reads() -> None:
    for source in (
        torch.randn(4, 6).t()[::2],
        torch.randn(4).expand(3, 4),
        torch.randn(3, dtype=torch.complex64).conj(),
    ):
        assert torch.equal(source.to("xla").cpu(), source)
    assert torch.equal(torch.randn(4, 6).bfloat16().t().to("xla").cpu().isnan(), torch.zeros(6, 4, dtype=torch.bool))


def test_torchs_threads_rest_while_xla_computes_on_the_cpu() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with runtime.undisturbed():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_unknown_platform_is_an_error_that_lists_them() -> None:
    with config.override(platform="quantum"), pytest.raises(ValueError, match="'CPU', 'GPU', 'CUDA', 'TPU'"):
        xla.real_devices()
    with config.override(platform="CPU"):
        assert xla.real_devices()[0] == "CPU:0"


def test_settings_come_from_the_environment_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.get("fallback") == "warn"
    monkeypatch.setenv("XLATRAINER_FALLBACK", "error")
    assert config.get("fallback") == "error"
    monkeypatch.setenv("XLATRAINER_MAX_PENDING_NODES", "7")
    assert config.get("max_pending_nodes") == 7
    monkeypatch.setenv("XLATRAINER_MAX_PENDING_NODES", "many")
    with pytest.raises(ValueError, match="XLATRAINER_MAX_PENDING_NODES='many' is no int"):
        config.get("max_pending_nodes")
    monkeypatch.setenv("XLATRAINER_FALLBACK", "maybe")
    with pytest.raises(ValueError, match="accepted are 'warn', 'error'"):
        config.get("fallback")
    with config.override(max_pending_nodes=9):
        assert config.get("max_pending_nodes") == 9
    with pytest.raises(KeyError, match="unknown settings"), config.override(nothing=1):
        pass


# Every variable by hand: what it is set to, and what the setting is then. What each does is tested where it is used.
VARIABLES = {
    "PJRT_DEVICE": ("platform", "TPU", "TPU"),
    "XLATRAINER_FALLBACK": ("fallback", "error", "error"),
    "XLATRAINER_CHECK_INDICES": ("check_indices", "off", "off"),
    "XLATRAINER_REPLAY": ("replay", "off", "off"),
    "XLATRAINER_CACHE_DIR": ("cache_dir", "/somewhere", "/somewhere"),
    "XLA_PERSISTENT_CACHE_PATH": ("cache_dir", "/elsewhere", "/elsewhere"),
    "XLATRAINER_CACHE_READONLY": ("cache_readonly", "on", "on"),
    "XLA_PERSISTENT_CACHE_READ_ONLY": ("cache_readonly", "1", "on"),
    "XLATRAINER_CACHE_MEGABYTES": ("cache_megabytes", "7", 7),
    "XLATRAINER_KEEP_MEMORY": ("keep_memory", "off", "off"),
    "XLA_MAX_ASYNC_QUEUE": ("max_async_closures", "3", 3),
    "PT_XLA_DEBUG": ("debug", "1", "1"),
    "PT_XLA_DEBUG_LEVEL": ("debug_level", "2", 2),
    "PT_XLA_DEBUG_FILE": ("debug_file", "f", "f"),
    "XLA_IR_DEBUG": ("ir_debug", "1", "1"),
    "XLA_HLO_DEBUG": ("hlo_debug", "1", "1"),
    "XLA_SAVE_TENSORS_FILE": ("save_tensors_file", "f", "f"),
    "XLA_SAVE_TENSORS_FMT": ("save_tensors_format", "dot", "dot"),
    "XLA_METRICS_FILE": ("metrics_file", "f", "f"),
    "XLA_METRICS_PERCENTILES": ("metrics_percentiles", "0.5", "0.5"),
    "XLA_METRICS_SAMPLES": ("metrics_samples", "9", 9),
    "XLA_SAVE_HLO_FILE": ("save_hlo_file", "f", "f"),
    "XLA_DUMP_HLO_GRAPH": ("dump_hlo_graph", "1", "1"),
    "XLA_SYNC_WAIT": ("sync_wait", "1", "1"),
    "XLA_GET_TENSORS_OPBYOP": ("get_tensors_opbyop", "1", "1"),
    "XLA_SYNC_TENSORS_OPBYOP": ("sync_tensors_opbyop", "1", "1"),
    "XLA_USE_BF16": ("use_bf16", "1", "1"),
    "XLA_DOWNCAST_BF16": ("downcast_bf16", "1", "1"),
    "XLA_USE_F16": ("use_f16", "1", "1"),
    "XLA_USE_FP16": ("use_f16", "1", "1"),
    "XLA_DOWNCAST_FP16": ("downcast_f16", "1", "1"),
    "XLA_USE_32BIT_LONG": ("use_32bit_long", "1", "1"),
    "XLATRAINER_MAX_LOADED_PROGRAMS": ("max_loaded_programs", "5", 5),
    "XLATRAINER_MAX_PENDING_NODES": ("max_pending_nodes", "7", 7),
    "CPU_NUM_DEVICES": ("cpu_devices", "3", 3),
    "GOOGLE_APPLICATION_CREDENTIALS": ("google_credentials", "f", "f"),
    "STORAGE_EMULATOR_HOST": ("storage_emulator", "localhost:9", "localhost:9"),
    "RANK": ("rank", "1", 1),
    "WORLD_SIZE": ("world_size", "2", 2),
    "LOCAL_RANK": ("local_rank", "1", 1),
    "MASTER_ADDR": ("master_addr", "there", "there"),
    "MASTER_PORT": ("master_port", "29500", 29500),
    "TORCHELASTIC_USE_AGENT_STORE": ("agent_store", "True", "True"),
    "TORCHELASTIC_RESTART_COUNT": ("restart_count", "1", 1),
    "XLATRAINER_JOIN_SECONDS": ("join_seconds", "7", 7),
    "XLATRAINER_HEARTBEAT_SECONDS": ("heartbeat_seconds", "7", 7),
}


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_sets_its_setting(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text, expected = VARIABLES[variable]
    monkeypatch.delenv(config.SETTINGS[name].variable, raising=False)
    assert config.get(name) == config.SETTINGS[name].default
    monkeypatch.setenv(variable, text)
    assert config.get(name) == expected


def test_no_variable_is_left_out() -> None:
    table = {
        variable: name
        for name, setting in config.SETTINGS.items()
        for variable in (setting.variable, *(variable for variable, _ in setting.also))
    }
    assert {variable: name for variable, (name, _, _) in VARIABLES.items()} == table


@pytest.mark.parametrize("name", config.SETTINGS)
def test_what_a_setting_does_is_tested(name: str) -> None:
    """Some test names it, besides the table above."""
    setting = config.SETTINGS[name]
    names = "|".join((name, setting.variable, *dict(setting.also)))
    here = Path(__file__).resolve()
    others = (path.read_text(encoding="utf-8") for path in here.parents[1].rglob("*.py") if path != here)
    named = any(re.search(rf"""["']({names})["']|\b({names})=""", text) for text in others)
    assert named or f"({name}=" in here.read_text(encoding="utf-8")
