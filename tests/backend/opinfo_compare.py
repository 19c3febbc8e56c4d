"""When the device's result counts as the CPU's: structure, shapes, dtypes, values.

Floats are compared with the tolerance of their dtype. Where that is too strict, the CPU's own rounding decides: the
operator is run once more on the CPU with more precise inputs, and a result may be as far from that one as the CPU's is
(three times as far, since another order of the same sums is luck). So poles, cancellation and long sums need no
tolerance of their own, and a formula that loses digits which the CPU keeps is found.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tests.backend.opinfo_tables import FREE, LEAVES, LOOSE

__all__ = ["difference"]

# rtol, atol: those of torch.testing.assert_close; sums of bfloat16 numbers near 1 are rounded to a few thousandths
TOLERANCES = {
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float32: (1.3e-6, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
}
LUCK = 3.0


def _finite_maximum(x: torch.Tensor) -> float:
    x = x.abs()
    x = x[x.isfinite()]
    return float(x.max()) if x.numel() else 0.0


def _as_near_as_cpu(
    actual: torch.Tensor, expected: torch.Tensor, precise: torch.Tensor, rtol: float, atol: float
) -> bool:
    wide = torch.complex128 if actual.dtype.is_complex else torch.float64
    actual, expected, precise = actual.to(wide), expected.to(wide), precise.to(wide)
    error = _finite_maximum(expected - precise)
    near = (actual - precise).abs() <= atol + rtol * precise.abs() + LUCK * error
    return bool((near | (actual == expected) | (actual.isnan() & expected.isnan())).all())


def _kind_difference(name: str, actual: Any, expected: Any) -> str:
    """Differences in anything but the values of tensors."""
    if not isinstance(expected, torch.Tensor):
        return "" if actual == expected else f"{actual!r} instead of {expected!r}"
    if not isinstance(actual, torch.Tensor):
        return f"{actual!r} instead of a tensor"
    if actual.device.type != "xla" and name not in LEAVES:
        return f"a tensor on {actual.device}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
    return ""


def _value_difference(actual: torch.Tensor, expected: torch.Tensor, precise: Callable[[], Any], name: str) -> str:
    rtol, atol = TOLERANCES.get(expected.dtype, (0.0, 0.0))
    if loose := LOOSE.get(name):
        rtol, atol = max(rtol, loose[0]), max(atol, loose[1])
    actual, expected = actual.detach().cpu(), expected.detach()
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        reference = precise() if expected.is_floating_point() or expected.is_complex() else None
        if reference is not None and _as_near_as_cpu(actual, expected, reference.detach(), rtol, atol):
            return ""
        return f"{error}\n{expected.dtype}{list(expected.shape)}"
    return ""


def difference(name: str, actual: Any, expected: Any, precise: Callable[[], Any]) -> str:
    """What is wrong with the results of the operator `name`, as text; empty if they are right.

    `precise` gives the CPU's results in more digits, or None where they cannot be had.
    """
    mine, theirs = tree_flatten(actual)[0], tree_flatten(expected)[0]
    if len(mine) != len(theirs):
        return f"{len(mine)} results instead of {len(theirs)}"
    found: list[Any] = []

    def more_precise(position: int) -> Any:
        if not found:
            found.append(precise())
        leaves = tree_flatten(found[0])[0]
        return leaves[position] if len(leaves) == len(theirs) else None

    for position, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        text = _kind_difference(name, one, other)
        if not text and isinstance(other, torch.Tensor) and name not in FREE:
            text = _value_difference(one, other, partial(more_precise, position), name)
        if text:
            return f"result {position}: {text}" if len(theirs) > 1 else text
    return ""
