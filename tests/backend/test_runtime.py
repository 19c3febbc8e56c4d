"""Copies to and from the device, and what surrounds them."""

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
