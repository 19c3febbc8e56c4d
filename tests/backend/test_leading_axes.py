"""Reductions over leading axes of long rows against CPU torch."""

from collections.abc import Callable

import pytest
import torch

import xlatrainer as xla
from xlatrainer.backend.lowerings import leading_axes
from xlatrainer.backend.recorder import state

REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.sum(0),
    "sum of two axes, kept": lambda t: t.sum((1, 0), keepdim=True),
    "mean": lambda t: t.mean((0, 1)),
    "amax": lambda t: t.amax(0),
    "amin of two axes, kept": lambda t: t.amin((0, 1), keepdim=True),
    "var": lambda t: t.var(0),
    "norm": lambda t: torch.linalg.vector_norm(t, dim=(0, 1)),
    "logsumexp": lambda t: t.logsumexp((0, 1)),
    "sum behind three": lambda t: t.transpose(0, 1).sum(1),
    "sum behind one of size 1": lambda t: t[:, None].unsqueeze(0).sum((1, 2), keepdim=True),
    "sum of axes that are apart": lambda t: t[:, None].expand(-1, 2, -1, -1).sum((0, 2)),
    "amax behind three": lambda t: t.transpose(0, 1).amax(1, keepdim=True),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [2, 16, 37, 300])
def test_values_and_gradients(name: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading_axes, "LONG_ROW", 7)
    here = torch.randn(rows, 3, 8, dtype=dtype, generator=torch.Generator().manual_seed(rows)).requires_grad_()
    there = here.detach().to("xla").requires_grad_()
    expected, result = (REDUCTIONS[name](tensor) for tensor in (here, there))
    torch.testing.assert_close(result.cpu(), expected)
    expected.square().sum().backward()
    result.square().sum().backward()
    assert here.grad is not None
    assert there.grad is not None
    torch.testing.assert_close(there.grad.cpu(), here.grad)


@pytest.mark.parametrize("name", ["sum", "amax", "amin of two axes, kept"])
def test_nan_and_infinities(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading_axes, "LONG_ROW", 3)
    tensor = torch.arange(60.0).reshape(20, 1, 3) - 30
    tensor[3, 0, 0], tensor[17, 0, 1], tensor[5, 0, 2], tensor[6, 0, 2] = torch.nan, torch.inf, torch.inf, -torch.inf
    torch.testing.assert_close(
        REDUCTIONS[name](tensor.to("xla")).cpu(), REDUCTIONS[name](tensor), equal_nan=True, rtol=0, atol=0
    )


def test_a_gradient_summed_over_the_batch_is_a_product() -> None:
    """As that of a position embedding: its rows are longer than what XLA's own reduction is quick for."""
    positions = torch.ones(128, 256, device="xla", requires_grad=True)
    batch = torch.ones(8, 128, 256, device="xla")
    xla.sync()
    ((batch + positions) * batch).sum().backward()
    root = state.trace.node
    xla.sync(wait=True)
    (program,) = root.programs
    assert "dot_general" in program.lowered().as_text()
    assert positions.grad is not None
    assert (positions.grad == 8).all()
