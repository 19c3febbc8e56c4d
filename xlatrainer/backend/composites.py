"""Operators that torch makes of others in a way that does not suit a device without data-dependent shapes.

These stand before autograd, which differentiates what they call. Each hands all other calls to torch's own composition.

May import: torch, counters, recurrent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xlatrainer.backend import counters
from xlatrainer.backend.recurrent import RECURRENT

__all__ = ["COMPOSITES"]

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
    if self.is_floating_point() or self.is_complex():
        raise NotImplementedError(f"aten::bincount is not implemented for {self.dtype}: it counts integers")
    if self.dim() != 1:
        raise RuntimeError(
            f"bincount only supports 1-d non-negative integral inputs, got {self.dtype}{list(self.shape)}"
        )
    if minlength < 0:
        raise RuntimeError(f"minlength should be >= 0, got {minlength}")
    if not self.numel():
        return torch.zeros(minlength, dtype=torch.int64, device=self.device)
    counters.add("sync::bincount")
    low, high = torch.stack(torch.aminmax(self)).tolist()
    if low < 0:
        raise RuntimeError(f"bincount only supports 1-d non-negative integral inputs, got {low}")
    if weights is None:
        weights = torch.ones_like(self, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.to(torch.float64)
    counts = torch.zeros(max(high + 1, minlength), dtype=weights.dtype, device=self.device)
    return counts.scatter_add(0, self.long(), weights)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """One operator with a gradient of its own where CPU torch has one, which does not keep the matrix of weights."""
    if not _one_attention(query, key, value, attn_mask, dropout_p, is_causal):
        own = aten.scaled_dot_product_attention.default
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return own.decompose(query, key, value, attn_mask, dropout_p, is_causal, **options)
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def _one_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> bool:
    """The conditions under which CPU torch takes its flash attention."""
    if dropout_p > 0 or not torch.backends.cuda.flash_sdp_enabled() or query.dim() != 4:
        return False
    batch, heads, rows, width = query.shape
    columns = key.shape[2] if key.dim() == 4 else 0
    shape = (batch, heads, columns, width)
    if not (rows and columns and width) or key.shape != shape or value.shape != shape:
        return False
    if not query.is_floating_point() or not query.dtype == key.dtype == value.dtype:
        return False
    if mask is None:
        return True
    if is_causal or mask.requires_grad or mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    fits = zip(reversed(mask.shape), (columns, rows, heads, batch), strict=False)
    return mask.dim() in (2, 4) and all(length in (1, whole) for length, whole in fits)


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


# By overload, without `aten::`.
COMPOSITES: dict[str, Callable[..., Any]] = {
    **RECURRENT,
    **{
        f"{name}.Tensor": _packed_scalars(name)
        for name in ("_foreach_addcdiv", "_foreach_addcdiv_", "_foreach_addcmul", "_foreach_addcmul_")
    },
    "bincount": bincount,
    "cross_entropy_loss": cross_entropy_loss,
    "ctc_loss.IntList": ctc_loss,
    "ctc_loss.Tensor": ctc_loss,
    "scaled_dot_product_attention": scaled_dot_product_attention,
}
