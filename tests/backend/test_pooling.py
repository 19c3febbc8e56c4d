"""Max pooling with few and with many channels, which are laid out differently on the CPU, against CPU torch."""

from typing import Any

import pytest
import torch
from torch.nn import functional

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "few channels": ((2, 3, 9, 8), {"kernel_size": 2}),
    "many channels": ((2, 20, 9, 8), {"kernel_size": 2}),
    "overlapping": ((2, 20, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "dilated": ((2, 20, 9, 8), {"kernel_size": (2, 3), "stride": 1, "dilation": (3, 2)}),
    "dilated, padded": ((2, 20, 9, 8), {"kernel_size": 4, "stride": 1, "dilation": 2, "padding": (2, 1)}),
    "ceil mode": ((2, 20, 9, 8), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    "unbatched": ((20, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "three dims": ((2, 17, 5, 6, 4), {"kernel_size": 2, "stride": (1, 2, 2)}),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_values_positions_and_gradients(name: str) -> None:
    shape, options = CASES[name]
    pool = functional.max_pool3d if len(shape) == 5 else functional.max_pool2d
    values = torch.randn(shape)
    values.view(-1)[::7] = 0.5  # equal values: the first one counts
    values.view(-1)[1::11], values.view(-1)[2::11] = 0.0, -0.0
    values.view(-1)[[3, 4, 11, 40]] = float("nan")  # the last one
    values.view(-1)[30:60] = -float("inf")
    results = []
    for device in ("cpu", "xla"):
        inputs = values.to(device).requires_grad_()
        out, indices = pool(inputs, return_indices=True, **options)
        weights = torch.arange(out.numel(), dtype=torch.float32).view(out.shape)
        (grad,) = torch.autograd.grad((out * weights.to(device)).nansum(), inputs)
        results.append((out.detach().cpu(), indices.cpu(), grad.cpu()))
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, equal_nan=True)
