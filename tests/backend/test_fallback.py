"""Operators without a lowering: right, counted, warned about once, and an error where the setting says so."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xlatrainer as xla
from xlatrainer import config
from xlatrainer.backend import counters, fallback


@pytest.fixture
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_warned", set())


# An operator that will stay without a lowering: torch itself only uses it for quantized models.
def _add_relu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._add_relu(tensor, tensor)


@pytest.mark.usefixtures("_unwarned")
def test_result_count_and_one_warning_with_the_line() -> None:
    source = torch.tensor([0.0, 2.0, -1.0], device="xla")
    before = counters.value("aten::_add_relu")
    with pytest.warns(RuntimeWarning, match=r"aten::_add_relu has no lowering.*test_fallback.py:\d+"):
        result = _add_relu(source)
    assert result.device == xla.device()
    assert result.tolist() == [0, 4, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _add_relu(source)
    assert counters.value("aten::_add_relu") == before + 2


@pytest.mark.usefixtures("_unwarned")
def test_the_setting_forbids_it() -> None:
    with (
        config.override(fallback="error"),
        pytest.raises(NotImplementedError, match=r"aten::_add_relu.*Add an operator"),
    ):
        _add_relu(torch.ones(3, device="xla"))


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


aten = torch.ops.aten
Calls = dict[str, tuple[str, Callable[[torch.Tensor], Any]]]


def _in_place(x: torch.Tensor) -> Any:
    result = aten._add_relu_(x, x * 2)
    return result, x


def _in_place_through_a_view(x: torch.Tensor) -> Any:
    aten._add_relu_(x.t()[1:, ::2], torch.ones((), device=x.device))
    return x


def _out(x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    assert aten._add_relu.out(x, x, out=out) is out
    return out


def _out_that_must_grow(x: torch.Tensor) -> Any:
    out = torch.empty(0, device=x.device)
    aten._add_relu.out(x, x, out=out)
    return out


# The operator, and a call of it.
CALLS: Calls = {
    "in place": ("aten::_add_relu_", _in_place),
    "in place through a view": ("aten::_add_relu_", _in_place_through_a_view),
    "out=": ("aten::_add_relu", _out),
    "out= that must grow": ("aten::_add_relu", _out_that_must_grow),
    "a number": ("aten::_add_relu", lambda x: aten._add_relu.Scalar(x, 1, alpha=2)),
    "keywords only": ("aten::_add_relu", lambda x: aten._add_relu(self=x, other=x, alpha=0.5)),
    "a 0-dim tensor of the CPU": ("aten::_add_relu", lambda x: aten._add_relu(x, torch.tensor(1.0))),
    "a transposed tensor": ("aten::_add_relu", lambda x: aten._add_relu(x.t(), x.t())),
    "an expanded tensor": ("aten::_add_relu", lambda x: aten._add_relu(x, x[:1].expand(3, 4))),
    "the same tensor twice": ("aten::_add_relu_", lambda x: aten._add_relu_(x, x)),
}


@pytest.mark.filterwarnings("ignore")  # torch says of itself that it resizes
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_kind(name: str) -> None:
    counter, call = CALLS[name]
    source = torch.randn(3, 4)
    on_device = source.to("xla")
    before = counters.value(counter)
    result = call(on_device)
    assert counters.value(counter) == before + 1
    expected = call(source)
    results = result if isinstance(result, tuple) else (result,)
    for a, b in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert a.is_xla
        assert a.dtype is b.dtype
        torch.testing.assert_close(a.cpu(), b)
    torch.testing.assert_close(on_device.cpu(), source)


@pytest.mark.filterwarnings("ignore:.*has no lowering:RuntimeWarning")
def test_in_place_returns_the_tensor_itself() -> None:
    x = torch.ones(3, device="xla")
    assert aten._add_relu_(x, x) is x


@pytest.mark.filterwarnings("ignore:.*has no lowering:RuntimeWarning")
def test_tensors_of_other_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"argument 'other' of aten::_add_relu is on cpu"):
        aten._add_relu(torch.ones(3, device="xla"), torch.ones(3))


_library = torch.library.Library("xlatrainer_tests", "FRAGMENT")
_library.define("gather_strides(Tensor[] tensors, Tensor? extra=None, *, int times=1) -> Tensor[]")
_library.define("shift_(Tensor(a!) self, Tensor by) -> Tensor(a!)")
_library.define("fill_all_(Tensor(a!)[] tensors, Tensor? value=None) -> ()")
_library.define("half(Tensor self) -> (Tensor, Tensor)")


def _gather_strides(tensors: list[torch.Tensor], extra: torch.Tensor | None = None, *, times: int = 1) -> Any:
    given = [*tensors, extra] if extra is not None else tensors
    return [torch.tensor(tensor.stride()) * times for tensor in given]


def _shift_(self: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    for step in range(len(self)):  # one after the other, so that it shows whether `by` is a part of `self`
        self[step] += by[0]
    return self


def _fill_all_(tensors: list[torch.Tensor], value: torch.Tensor | None = None) -> None:
    for tensor in tensors:
        tensor.copy_(torch.zeros(()) if value is None else value)


_library.impl("gather_strides", _gather_strides, "CPU")
_library.impl("shift_", _shift_, "CPU")
_library.impl("fill_all_", _fill_all_, "CPU")
_library.impl("half", lambda self: (self / 2, self.floor()), "CPU")


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> Any:
        return torch.ops.xlatrainer_tests.half(x)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] / 2


@pytest.mark.filterwarnings("ignore:.*has no lowering:RuntimeWarning")
def test_strides_lists_and_optional_tensors() -> None:
    x = torch.randn(4, 6, device="xla")
    tensors = [x, x.t(), torch.randn(4, 6, device="xla")[:, ::2], torch.randn(1, 3, device="xla").expand(2, 3)]
    for extra in (None, torch.randn(2, 2, device="xla").t()):
        strides = torch.ops.xlatrainer_tests.gather_strides(tensors, extra, times=2)
        expected = [tensor.stride() for tensor in ([*tensors, extra] if extra is not None else tensors)]
        assert [tuple((s // 2).tolist()) for s in strides] == expected
        assert all(s.is_xla for s in strides)


@pytest.mark.filterwarnings("ignore:.*has no lowering:RuntimeWarning")
def test_arguments_that_share_a_storage_share_it_on_the_cpu() -> None:
    for device in ("cpu", "xla"):
        x = torch.ones(4, device=device)
        torch.ops.xlatrainer_tests.shift_(x, x[:1])
        assert x.tolist() == [2, 3, 3, 3]
        y = torch.arange(6.0).to(device).view(2, 3)
        torch.ops.xlatrainer_tests.shift_(y[:, 1], y.view(-1)[4:])
        assert y.tolist() == [[0, 5, 2], [3, 8, 5]]


@pytest.mark.filterwarnings("ignore:.*has no lowering:RuntimeWarning")
def test_lists_of_tensors_are_written() -> None:
    x, y = torch.ones(2, 3, device="xla"), torch.ones(2, device="xla")
    torch.ops.xlatrainer_tests.fill_all_([x[:, 1], y], torch.tensor(7.0, device="xla"))
    assert (x.tolist(), y.tolist()) == ([[1, 7, 1], [1, 7, 1]], [7, 7])
    torch.ops.xlatrainer_tests.fill_all_([y])
    assert y.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:.*has no lowering:RuntimeWarning")
def test_gradients_flow_through_several_results() -> None:
    x = torch.randn(3, device="xla", requires_grad=True)
    half, _ = _Half.apply(x * 3)  # type: ignore[no-untyped-call]
    (half * torch.arange(3.0, device="xla")).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1.5, 3]
