"""Gradients for which torch would wait for a number: the same numbers, and nothing is read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from xlatrainer.backend import counters

ZEROS = torch.tensor([[1.0, 0.0, 3.0, 2.0], [0.0, 2.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
NAN = torch.tensor([1.0, float("nan"), 3.0, 0.0])

CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "cumprod": (lambda x: x.cumprod(1), (ZEROS,)),
    "cumprod of a row": (lambda x: x.cumprod(0), (ZEROS[0],)),
    "cumprod along the first dim": (lambda x: x.cumprod(-2), (ZEROS,)),
    "cumprod of two zeros": (lambda x: x.cumprod(0), (torch.tensor([2.0, 0.0, 3.0, 0.0, 5.0]),)),
    "cumprod in float64": (lambda x: x.cumprod(1, dtype=torch.float64), (ZEROS,)),
    "cumprod of nothing": (lambda x: x.cumprod(0), (torch.zeros(0),)),
    "cumprod of NaN": (lambda x: x.cumprod(0), (torch.tensor([1.0, 2.0, float("nan"), 3.0]),)),
    "prod": (torch.prod, (ZEROS,)),
    "prod of a row": (torch.prod, (ZEROS[0],)),
    "prod without zeros": (torch.prod, (ZEROS[2],)),
    "prod of NaN": (torch.prod, (NAN,)),
    "prod of nothing": (torch.prod, (torch.zeros(0),)),
    "prod along a dim": (lambda x: x.prod(1), (ZEROS,)),
    "prod that keeps the dim": (lambda x: x.prod(-2, keepdim=True), (ZEROS,)),
    "prod in float64": (lambda x: x.prod(0, dtype=torch.float64), (ZEROS,)),
    "masked_fill": (lambda x, value: x.masked_fill(x > 1, value), (ZEROS, torch.tensor(2.0))),
    "masked_fill_": (lambda x, value: (x * 1).masked_fill_(x > 1, value), (ZEROS, torch.tensor(2.0))),
    "index_fill_": (
        lambda x, value: (x * 1).index_fill_(1, torch.tensor([0, 0, 2], device=x.device), value),
        (ZEROS, torch.tensor(2.0)),
    ),
    "index_fill": (
        lambda x, value: x.index_fill(1, torch.tensor([0, 0, 2], device=x.device), value),
        (ZEROS, torch.tensor(2.0)),
    ),
    **{
        f"{name} of {what}": (getattr(torch, name), (tensor,))
        for name in ("max", "min", "median", "nanmedian")
        for what, tensor in {"equal elements": ZEROS, "NaN": NAN}.items()
    },
}


def _gradients(call: Callable[..., torch.Tensor], device: str, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    leaves = [tensor.clone().to(device).requires_grad_() for tensor in inputs]
    result = call(*leaves)
    return [result.detach(), *torch.autograd.grad((result * result).sum(), leaves)]


@pytest.mark.parametrize("name", CALLS)
def test_first_gradients_read_nothing(name: str) -> None:
    call, inputs = CALLS[name]
    expected = _gradients(call, "cpu", inputs)
    counters.reset()
    actual = _gradients(call, "xla", inputs)
    assert not [counter for counter in counters.snapshot() if "::" in counter]
    torch.testing.assert_close([tensor.cpu() for tensor in actual], expected, equal_nan=True)


@pytest.mark.parametrize("inputs", [ZEROS, ZEROS + 1], ids=["zeros", "no zeros"])
def test_second_gradients(inputs: torch.Tensor) -> None:
    def second(x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((x.prod(1) ** 2).sum() + x.max() ** 2, x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)[0]

    torch.testing.assert_close(second(inputs.to("xla")).cpu(), second(inputs))


# torch compiles decompositions of its own when forward-mode differentiation is used for the first time.
@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_function_transforms() -> None:
    x = torch.rand(3, 4)
    for transform in (
        torch.func.vmap(torch.func.grad(torch.prod)),
        torch.func.jacrev(lambda t: t.prod(0)),
        torch.func.grad(torch.max),
        torch.func.hessian(torch.prod),
    ):
        torch.testing.assert_close(transform(x.to("xla")).cpu(), transform(x))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_forward_mode() -> None:
    def tangent(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.requires_grad_(), torch.ones_like(x))
            result = torch.autograd.forward_ad.unpack_dual(dual.prod()).tangent
            assert result is not None
            return result.detach()

    torch.testing.assert_close(tangent(ZEROS[2].to("xla")).cpu(), tangent(ZEROS[2].clone()))
