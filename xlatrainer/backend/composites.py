"""Operators that torch makes of others in a way that does not suit a device without data-dependent shapes.

These stand before autograd, which differentiates what they call. Each hands all other calls to torch's own composition.

May import: _private_api, torch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xlatrainer.backend._private_api import below_autograd

__all__ = ["BEFORE_AUTOGRAD", "COMPOSITES"]

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def cross_entropy_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """For a mean with label smoothing torch selects the examples that count by a mask and waits for their number."""
    if label_smoothing == 0.0 or reduction != _MEAN or target.is_floating_point():
        own = aten.cross_entropy_loss.default
        return own.decompose(self, target, weight, reduction, ignore_index, label_smoothing)
    class_dim = 0 if self.dim() == 1 else 1
    log_probs = torch.log_softmax(self, class_dim)
    nll = aten.nll_loss_nd(log_probs, target, weight, reduction, ignore_index)
    smooth = log_probs
    counted = target != ignore_index
    shares = counted.to(log_probs.dtype)
    if weight is not None:
        smooth = smooth * weight.view([-1 if d == class_dim else 1 for d in range(self.dim())])
        shares = torch.where(counted, weight[torch.where(counted, target, 0)], 0)
    smooth = torch.where(counted, -smooth.sum(class_dim), 0).sum() / shares.sum()
    return (1 - label_smoothing) * nll + label_smoothing / self.size(class_dim) * smooth


def _padded_targets(targets: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Labels that stand one behind another as rows, (N, S); what stands behind the labels of a row is not used."""
    ends = torch.tensor(lengths).cumsum(0)
    places = (ends - torch.tensor(lengths))[:, None] + torch.arange(max(lengths, default=0))
    return targets[places.clamp(max=max(targets.numel() - 1, 0)).to(targets.device)]


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """torch reads the lengths, which would make a program for each; here they are data.

    Targets that stand one behind another are the exception: where a row begins depends on the lengths before it.
    """
    batched = log_probs.dim() == 3
    if not batched:
        log_probs = log_probs.unsqueeze(1)
    lengths = [torch.as_tensor(given).reshape(-1) for given in (input_lengths, target_lengths)]
    if targets.dim() == 1:
        targets = _padded_targets(targets, lengths[1].tolist())
    device = log_probs.device
    inputs, labels = (given.to(device, torch.int64) for given in lengths)
    targets = targets.to(device, torch.int64)
    loss = aten._ctc_loss.Tensor(log_probs, targets, inputs, labels, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0, loss)
    if reduction == _MEAN:
        return (loss / labels.clamp(min=1)).mean()
    if reduction == _SUM:
        return loss.sum()
    return loss if batched else loss.squeeze(0)


def bincount(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """The bounds are read, since the result is as long as the largest number."""
    if self.dim() != 1 or self.is_floating_point():
        raise RuntimeError(
            f"bincount only supports 1-d non-negative integral inputs, got {self.dtype}{list(self.shape)}"
        )
    if minlength < 0:
        raise RuntimeError(f"minlength should be >= 0, got {minlength}")
    if not self.numel():
        return torch.zeros(minlength, dtype=torch.int64, device=self.device)
    low, high = torch.stack(torch.aminmax(self)).tolist()
    if low < 0:
        raise RuntimeError(f"bincount only supports 1-d non-negative integral inputs, got {low}")
    if weights is None:
        weights = torch.ones_like(self, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.to(torch.float64)
    counts = torch.zeros(max(high + 1, minlength), dtype=weights.dtype, device=self.device)
    return counts.scatter_add(0, self.long(), weights)


def _differentiable_product(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The product along `dim`, which is kept: halves times halves, whose gradients know nothing of zeros."""
    length = x.size(dim)
    if not length:
        return x.sum(dim, keepdim=True) + 1
    while length > 1:
        half = length // 2
        product = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = torch.cat([product, x.narrow(dim, length - 1, 1)], dim) if length % 2 else product
        length = x.size(dim)
    return x


def prod(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """torch's gradient looks for zeros among the values, whose places it needs on the host."""
    if not (self.requires_grad and torch.is_grad_enabled()):
        with below_autograd():
            return aten.prod.default(self, dtype=dtype)
    x = self if dtype is None else self.to(dtype)
    return _differentiable_product(x.reshape(-1), 0).reshape(())


def prod_dim_int(
    self: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """As `prod`; torch's gradient reads the number of zeros."""
    if not (self.requires_grad and torch.is_grad_enabled()):
        with below_autograd():
            return aten.prod.dim_int(self, dim, keepdim, dtype=dtype)
    x = self if dtype is None else self.to(dtype)
    if self.dim() == 0:
        return x.reshape(1).prod(dim)
    product = _differentiable_product(x, dim)
    return product if keepdim else product.squeeze(dim)


def masked_fill(self: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch's gradient of the value selects by the mask, which has a length that depends on data."""
    if not (torch.is_grad_enabled() and (self.requires_grad or value.requires_grad)):
        with below_autograd():
            return aten.masked_fill.Tensor(self, mask, value)
    return torch.where(mask, _as_filling(self, value), self)


def index_fill(self: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """torch's gradient of the value looks for indices that come twice."""
    if not (torch.is_grad_enabled() and (self.requires_grad or value.requires_grad)):
        with below_autograd():
            return aten.index_fill.int_Tensor(self, dim, index, value)
    shape = [1] * self.dim()
    if shape:
        shape[dim] = self.size(dim)
    filled = torch.zeros(math.prod(shape), dtype=torch.bool, device=self.device).index_fill(0, index, True)
    return torch.where(filled.view(shape), _as_filling(self, value), self)


def _as_filling(self: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.dim():
        raise RuntimeError(f"the value must be a tensor of 0 dims, but it has {value.dim()}")
    return value.to(self.device, self.dtype)


def kaiser_window(
    window_length: int,
    periodic: bool = True,
    beta: float = 12.0,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """torch's own kernel for all devices looks for a part that only the CPU and CUDA have."""
    dtype = dtype or torch.get_default_dtype()
    if window_length < 0:
        raise RuntimeError(f"kaiser_window requires non-negative window_length, got window_length={window_length}")
    if not dtype.is_floating_point:
        raise RuntimeError(f"kaiser_window expects floating point dtypes, got: {dtype}")
    if window_length < 2:
        return torch.ones(window_length, dtype=dtype, device=device)
    last = window_length if periodic else window_length - 1
    places = torch.arange(window_length, dtype=dtype, device=device) * (2 / last) - 1
    bound = torch.special.i0(torch.tensor(beta, dtype=torch.float64)).item()
    return torch.special.i0(beta * (1 - places * places).sqrt()) / bound


def _packed_scalars(name: str) -> Callable[..., Any]:
    """A foreach operator whose scalars come as one tensor, which torch reads and wants on the CPU."""

    def call(self: Any, tensor1: Any, tensor2: Any, scalars: torch.Tensor) -> Any:
        if scalars.device.type != "cpu" or scalars.dim() != 1:
            raise RuntimeError(
                f"Expected scalars to be on CPU and of dimension 1, got {scalars.device} and {scalars.dim()} instead "
                f"({name})"
            )
        return getattr(aten, name).ScalarList(self, tensor1, tensor2, scalars.tolist())

    return call


# By overload, without `aten::`: what stands before the autograd of operators that have a lowering too.
BEFORE_AUTOGRAD: dict[str, Callable[..., Any]] = {
    "index_fill.int_Tensor": index_fill,
    "masked_fill.Tensor": masked_fill,
    "prod": prod,
    "prod.dim_int": prod_dim_int,
}

# By overload, without `aten::`.
COMPOSITES: dict[str, Callable[..., Any]] = {
    **{
        f"{name}.Tensor": _packed_scalars(name)
        for name in ("_foreach_addcdiv", "_foreach_addcdiv_", "_foreach_addcmul", "_foreach_addcmul_")
    },
    **dict.fromkeys(("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta"), kaiser_window),
    "bincount": bincount,
    "cross_entropy_loss": cross_entropy_loss,
    "ctc_loss.IntList": ctc_loss,
    "ctc_loss.Tensor": ctc_loss,
}
