"""Operators that torch makes of others in a way that does not suit a device without data-dependent shapes.

These stand before autograd, which differentiates what they call. Each hands all other calls to torch's own composition.

May import: torch.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["COMPOSITES"]

aten = torch.ops.aten
_MEAN = 1


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


# By overload, without `aten::`.
COMPOSITES: dict[str, Callable[..., Any]] = {"cross_entropy_loss": cross_entropy_loss}
