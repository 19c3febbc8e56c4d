"""Sums and maxima over leading axes, on the CPU: the gradients of what is added to each row of a batch are such sums.

    python -m benchmarks.reduction

Prints for each shape the milliseconds of torch eager, of XLA as it chooses, and of `lowerings/leading_axes.py`.
Medians; run it on a quiet machine.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.matmul import compiled, milliseconds
from xlatrainer.backend.lowerings import leading_axes

SHAPES = ((8, 128, 256), (8, 1024, 768), (64, 197, 192), (16, 16384), (64, 32768), (500, 32768), (1000, 1000))


FORMS: dict[str, tuple[Callable[..., Any], ...]] = {
    "sum": (lambda t: t.sum(0), lambda a: a.sum(0), lambda a: leading_axes.total(a, (0,))),
    "max": (lambda t: t.amax(0), lambda a: a.max(0), lambda a: leading_axes.maximum(a, (0,))),
}


def main() -> None:
    for shape in SHAPES:
        tensor = torch.randn(shape)
        for name, (eager, usual, ours) in FORMS.items():
            theirs = milliseconds(partial(eager, tensor))
            times = (compiled(form, tensor.numpy()) for form in (usual, ours))
            print(f"{name} of {shape}: torch {theirs:.2f}  XLA {next(times):.2f}  ours {next(times):.2f}")


if __name__ == "__main__":
    main()
