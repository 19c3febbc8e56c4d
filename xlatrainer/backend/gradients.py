"""Operators whose gradient in torch waits for a number from the device; here it is computed without.

These stand at the autograd key before torch's own kernels and hand every call to those that has no such gradient.

May import: torch, _private_api.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from xlatrainer.backend._private_api import call_autograd_kernel, function_transforms_active

__all__ = ["GRADIENTS"]

aten = torch.ops.aten


def _wants_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _left_to_torch(tensor: torch.Tensor) -> bool:
    """True where there is no gradient to take, or a kind of it that an `autograd.Function` does not have."""
    return not _wants_gradient(tensor) or function_transforms_active() or unpack_dual(tensor).tangent is not None


def masked_fill(self: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch selects the gradients of what was filled, to add them up."""
    if not _wants_gradient(value) or value.dim():
        return call_autograd_kernel(aten.masked_fill.Tensor, self, mask, value)
    return torch.where(mask, value.to(self), self)


def masked_fill_(self: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not _wants_gradient(value) or value.dim():
        return call_autograd_kernel(aten.masked_fill_.Tensor, self, mask, value)
    return self.copy_(torch.where(mask, value.to(self), self))


def index_fill(self: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch adds up the gradients of the rows that were filled, each once: it looks for the unique indices."""
    if not _wants_gradient(value) or value.dim() or not self.dim():
        return call_autograd_kernel(aten.index_fill.int_Tensor, self, dim, index, value)
    filled = torch.zeros(self.shape[dim], dtype=torch.bool, device=self.device).index_fill(0, index, True)
    shape = [-1 if d == dim % self.dim() else 1 for d in range(self.dim())]
    return torch.where(filled.view(shape), value.to(self), self)


def index_fill_(self: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not _wants_gradient(value) or value.dim() or not self.dim():
        return call_autograd_kernel(aten.index_fill_.int_Tensor, self, dim, index, value)
    return self.copy_(index_fill(self, dim, index, value))


class _Extreme(torch.autograd.Function):
    """An element of a tensor: its gradient is spread over the elements equal to it. torch asks whether it is NaN."""

    @staticmethod
    def forward(ctx: Any, overload: Any, self: torch.Tensor) -> torch.Tensor:
        result = call_autograd_kernel(overload, self)
        ctx.save_for_backward(self, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        self, result = (tensor.detach() for tensor in ctx.saved_tensors)
        chosen = (self == result) | (self.isnan() & result.isnan())
        return None, torch.where(chosen, grads[0] / chosen.sum(), 0)


def _extreme(overload: Any) -> Callable[..., torch.Tensor]:
    def kernel(self: torch.Tensor) -> torch.Tensor:
        if _left_to_torch(self):
            return call_autograd_kernel(overload, self)
        return _Extreme.apply(overload, self)

    return kernel


def _own_gradient(overload: Any, self: torch.Tensor, grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch's own gradient, which can be differentiated again."""
    with torch.enable_grad():
        result = call_autograd_kernel(overload, self, *args, **kwargs)
    return torch.autograd.grad(result, self, grad, create_graph=True)[0]


def _other_factors(factors: torch.Tensor, dim: int) -> torch.Tensor:
    """For each element the product of the others along `dim`, also where there are zeros."""
    zero = factors == 0
    zeros = zero.sum(dim, keepdim=True)
    nonzero = torch.where(zero, 1, factors)
    product = nonzero.prod(dim, keepdim=True)
    return torch.where(zero, torch.where(zeros == 1, product, 0), torch.where(zeros == 0, product / nonzero, 0))


class _Prod(torch.autograd.Function):
    """torch looks for zeros among the factors, and then how to go on."""

    @staticmethod
    def forward(ctx: Any, overload: Any, self: torch.Tensor, args: tuple[Any, ...], dtype: Any) -> torch.Tensor:
        ctx.save_for_backward(self)
        ctx.call = (overload, args, dtype)
        return call_autograd_kernel(overload, self, *args, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (self,) = ctx.saved_tensors
        overload, args, dtype = ctx.call
        grad = grads[0]
        if torch.is_grad_enabled():
            return None, _own_gradient(overload, self, grad, *args, dtype=dtype), None, None
        factors = self if dtype is None else self.to(dtype)
        if args:
            dim, keepdim = args
            result = (grad if keepdim else grad.unsqueeze(dim)) * _other_factors(factors, dim).conj()
        else:
            result = grad * _other_factors(factors.reshape(-1), 0).view(factors.shape).conj()
        return None, result.to(self.dtype), None, None


def _prod(overload: Any, self: torch.Tensor, args: tuple[Any, ...], dtype: torch.dtype | None) -> torch.Tensor:
    if not self.dim() or _left_to_torch(self):
        return call_autograd_kernel(overload, self, *args, dtype=dtype)
    return _Prod.apply(overload, self, args, dtype)


def prod(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _prod(aten.prod.default, self, (), dtype)


def prod_dim_int(
    self: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _prod(aten.prod.dim_int, self, (dim, keepdim), dtype)


def _summed_from_the_end(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.flip(dim).cumsum(dim).flip(dim)


class _Cumprod(torch.autograd.Function):
    """torch looks for zeros among the factors, and then how to go on."""

    @staticmethod
    def forward(ctx: Any, self: torch.Tensor, dim: int, dtype: Any) -> torch.Tensor:
        result = call_autograd_kernel(aten.cumprod.default, self, dim, dtype=dtype)
        ctx.save_for_backward(self, result)
        ctx.call = (dim, dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dim, dtype = ctx.call
        grad = grads[0]
        if torch.is_grad_enabled():
            return _own_gradient(aten.cumprod.default, ctx.saved_tensors[0], grad, dim, dtype=dtype), None, None
        self, result = (tensor.detach() for tensor in ctx.saved_tensors)
        factors = self if dtype is None else self.to(dtype)
        # Products from the first zero on are 0 whatever the factors are, but for that zero itself: their slope there is
        # what they would be without it. Factors behind it count for nothing.
        zero = factors == 0
        zeros = zero.cumsum(dim)
        first = zero & (zeros == 1)
        before = _summed_from_the_end(grad * result.conj(), dim) / torch.where(zero, 1, factors).conj()
        without = torch.where(first, 1, factors).cumprod(dim)
        slope = _summed_from_the_end(grad * without.conj(), dim)
        return torch.where(zeros == 0, before, torch.where(first, slope, 0)).to(self.dtype), None, None


def cumprod(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    if not self.dim() or _left_to_torch(self):
        return call_autograd_kernel(aten.cumprod.default, self, dim, dtype=dtype)
    return _Cumprod.apply(self, dim, dtype)


# By overload, without `aten::`.
GRADIENTS: dict[str, Callable[..., Any]] = {
    **{name: _extreme(getattr(aten, name).default) for name in ("max", "min", "median", "nanmedian")},
    "cumprod": cumprod,
    "index_fill.int_Tensor": index_fill,
    "index_fill_.int_Tensor": index_fill_,
    "masked_fill.Tensor": masked_fill,
    "masked_fill_.Tensor": masked_fill_,
    "prod": prod,
    "prod.dim_int": prod_dim_int,
}
