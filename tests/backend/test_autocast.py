"""`torch.autocast("xla")`: the dtypes are those that torch documents for CUDA, and the values those of the casts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xlatrainer  # noqa: F401 - registers the device
from xlatrainer.backend.autocast import FLOAT32, FLOAT32_UNLESS_TOLD, LOWER, WIDEST

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def on(value: Tensor) -> Tensor:
    return value.to("xla")


X, W = torch.randn(4, 8), torch.randn(8, 8)

CALLS: dict[str, tuple[Callable[..., Tensor], torch.dtype]] = {
    "matmul": (lambda x, w: x @ w, BF16),
    "linear": (lambda x, w: F.linear(x, w, w[0]), BF16),
    "conv1d": (lambda x, w: F.conv1d(x[None], w[:3, :4, None]), BF16),
    "bmm": (lambda x, w: torch.bmm(x[None], w[None]), BF16),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x[None], x[None], x[None]), BF16),
    "exp": (lambda x, w: x.bfloat16().exp(), F32),
    "softmax": (lambda x, w: x.bfloat16().softmax(1), F32),
    "softmax in another": (lambda x, w: x.bfloat16().softmax(1, BF16), BF16),
    "sum": (lambda x, w: x.bfloat16().sum(), F32),
    "layer norm": (lambda x, w: F.layer_norm(x.bfloat16(), (8,)), F32),
    "mse": (lambda x, w: F.mse_loss(x.bfloat16(), x.bfloat16() + 1), F32),
    "cross entropy": (lambda x, w: F.cross_entropy(x.bfloat16(), torch.ones(4, dtype=torch.long, device="xla")), F32),
    "cat": (lambda x, w: torch.cat([x, x.bfloat16()]), F32),
    "cat of lower ones": (lambda x, w: torch.cat([x.bfloat16(), x.bfloat16()]), BF16),
    "relu": (lambda x, w: x.relu(), F32),
    "add": (lambda x, w: x.bfloat16() + 1, BF16),
    "of doubles": (lambda x, w: x.double() @ w.double(), torch.float64),
}


@pytest.mark.parametrize("name", CALLS)
def test_dtypes(name: str) -> None:
    call, dtype = CALLS[name]
    with torch.autocast("xla", dtype=BF16):
        assert call(on(X), on(W)).dtype == dtype
    with torch.autocast("xla", enabled=False):
        assert (on(X) @ on(W)).dtype == F32
    assert (on(X) @ on(W)).dtype == F32


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_values_and_gradients_are_those_of_the_casts(dtype: torch.dtype) -> None:
    weight = on(W).requires_grad_()
    with torch.autocast("xla", dtype=dtype):
        loss = F.mse_loss(on(X) @ weight, on(X))
    loss.backward()
    expected_weight = W.clone().requires_grad_()
    expected = F.mse_loss((X.to(dtype) @ expected_weight.to(dtype)).float(), X)
    expected.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == F32
    tolerance = 1e-2 if dtype == BF16 else 1e-3
    torch.testing.assert_close(loss.cpu(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(weight.grad.cpu(), expected_weight.grad, atol=tolerance, rtol=tolerance)


def test_modules() -> None:
    torch.manual_seed(0)
    modules: dict[str, tuple[nn.Module, Tensor]] = {
        "norms": (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4)),
            torch.randn(2, 3, 8, 8),
        ),
        "lstm": (nn.LSTM(8, 6, batch_first=True), torch.randn(2, 5, 8)),
        "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), torch.randn(2, 5, 8)),
    }
    for name, (module, x) in modules.items():
        expected: Any = module(x)
        module = module.to("xla")
        with torch.autocast("xla", dtype=BF16):
            output: Any = module(on(x))
        if isinstance(output, tuple):
            expected, output = expected[0], output[0]
        torch.testing.assert_close(
            output.float().cpu(), expected, atol=0.05, rtol=0.05, msg=lambda text, n=name: f"{n}: {text}"
        )
        output.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == F32 for p in module.parameters()), name


def test_what_is_unsafe_is_refused() -> None:
    with (
        torch.autocast("xla", dtype=BF16),
        pytest.raises(RuntimeError, match="use binary_cross_entropy_with_logits|Use binary"),
    ):
        F.binary_cross_entropy(on(X).sigmoid(), on(X).sigmoid())


def test_no_operator_is_in_two_lists() -> None:
    names = [*LOWER.split(), *FLOAT32.split(), *FLOAT32_UNLESS_TOLD.split(), *WIDEST.split()]
    assert len(set(names)) == len(names)
