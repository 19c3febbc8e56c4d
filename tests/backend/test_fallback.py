"""Operators without a lowering: right, counted, warned about once, and an error where the setting says so."""

import warnings

import pytest
import torch

import xlatrainer as xla
from xlatrainer import config
from xlatrainer.backend import counters, fallback


@pytest.fixture
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_warned", set())


# An operator that will stay without a lowering: the size of its result is data.
def _unique_positions(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(tensor)


@pytest.mark.usefixtures("_unwarned")
def test_result_count_and_one_warning_with_the_line() -> None:
    source = torch.tensor([0.0, 2.0, 0.0, 3.0], device="xla")
    before = counters.value("aten::nonzero")
    with pytest.warns(RuntimeWarning, match=r"aten::nonzero has no lowering.*test_fallback.py:\d+"):
        result = _unique_positions(source)
    assert result.device == xla.device()
    assert result.tolist() == [[1], [3]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _unique_positions(source)
    assert counters.value("aten::nonzero") == before + 2


@pytest.mark.usefixtures("_unwarned")
def test_the_setting_forbids_it() -> None:
    with config.override(fallback="error"), pytest.raises(NotImplementedError, match=r"aten::nonzero.*Add an operator"):
        _unique_positions(torch.ones(3, device="xla"))


@torch.library.custom_op("xlatrainer_tests::twice", mutates_args=(), device_types="cpu")
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("xlatrainer_tests::increase", mutates_args=("x",), device_types="cpu")
def _increase(x: torch.Tensor, by: float) -> None:
    x.add_(by)


@pytest.mark.filterwarnings("ignore:.*has no lowering:RuntimeWarning")
def test_a_users_own_operator_with_a_cpu_kernel() -> None:
    assert _twice(torch.ones(3, device="xla")).tolist() == [2, 2, 2]
    base = torch.zeros(2, 3, device="xla")
    _increase(base[:, 1], 5.0)
    assert base.tolist() == [[0, 5, 0], [0, 5, 0]]
    assert counters.value("xlatrainer_tests::twice") >= 1


@pytest.mark.filterwarnings("ignore:.*has no lowering:RuntimeWarning")
def test_gradients_pass_through_the_middle_of_a_model() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return _twice(x)

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            return _twice(grads[0])

    first, last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    inputs = torch.randn(5, 3)
    expected = (first(inputs) * 2).relu()
    last(expected).sum().backward()
    gradient = first.weight.grad
    first, last = torch.nn.Linear(3, 4).to("xla"), last.to("xla")
    assert gradient is not None
    with torch.no_grad():
        x = torch.nn.Parameter(inputs.to("xla"))
    Twice.apply(first(x)).sum().backward()  # type: ignore[no-untyped-call]
    assert first.weight.grad is not None
    torch.testing.assert_close(first.weight.grad.cpu(), (2 * inputs.sum(0)).expand(4, 3))


@pytest.mark.filterwarnings("ignore:.*has no lowering:RuntimeWarning")
def test_results_of_every_kind_come_back() -> None:
    source = torch.tensor([[4.0, 1.0], [2.0, 3.0]])
    for operator in (torch.unique, lambda t: torch.unique(t, return_counts=True), torch.linalg.eigvals, torch.histc):
        expected, result = operator(source), operator(source.to("xla"))
        expected, result = (x if isinstance(x, tuple) else (x,) for x in (expected, result))
        for a, b in zip(expected, result, strict=True):
            assert b.is_xla
            torch.testing.assert_close(b.cpu(), a)
