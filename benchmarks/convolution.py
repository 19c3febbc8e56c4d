"""The forms of a convolution on this machine's CPU: XLA's own, ours of `lowerings/convolution_cpu.py`, and torch's.

    python benchmarks/convolution.py

Prints the fastest of a few runs in milliseconds, each form of a row in turn. `-` is a form that ours leaves to XLA.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional

from xlatrainer.backend.lowerings import convolution, convolution_cpu
from xlatrainer.backend.lowerings.convolution import Geometry
from xlatrainer.backend.runtime import compiler_options

ROUNDS = 15
# input, weight, stride, padding, groups
SHAPES = [
    ((128, 1, 28, 28), (10, 1, 5, 5), 1, 0, 1),
    ((128, 10, 12, 12), (20, 10, 5, 5), 1, 0, 1),
    ((8, 3, 64, 64), (64, 3, 7, 7), 2, 3, 1),
    ((8, 64, 16, 16), (64, 64, 3, 3), 1, 1, 1),
    ((8, 128, 8, 8), (128, 128, 3, 3), 1, 1, 1),
    ((8, 256, 4, 4), (256, 256, 3, 3), 1, 1, 1),
    ((8, 512, 2, 2), (512, 512, 3, 3), 1, 1, 1),
    ((8, 256, 16, 16), (64, 256, 1, 1), 1, 0, 1),
    ((32, 16, 32, 32), (32, 16, 3, 3), 1, 1, 1),
    ((8, 64, 28, 28), (64, 64, 3, 3), 1, 1, 1),
    ((8, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1),
    ((4, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1),
    ((4, 32, 64, 64), (32, 32, 3, 3), 1, 1, 1),
    ((4, 256, 56, 56), (256, 256, 3, 3), 1, 1, 1),
    ((16, 32, 56, 56), (32, 8, 3, 3), 1, 1, 4),
    ((2, 64, 8, 28, 28), (64, 64, 3, 3, 3), 1, 1, 1),
    ((8, 96, 28, 28), (96, 1, 3, 3), 1, 1, 96),
    ((8, 96, 56, 56), (96, 1, 3, 3), 2, 1, 96),
    ((8, 240, 14, 14), (240, 1, 5, 5), 1, 2, 240),
    ((8, 240, 28, 28), (240, 1, 5, 5), 2, 2, 240),
    ((8, 384, 14, 14), (384, 1, 7, 7), 1, 3, 384),
    ((8, 96, 56, 56), (96, 1, 7, 7), 2, 3, 96),
]


def fastest(functions: list[Callable[[], Any] | None]) -> list[float | None]:
    """Milliseconds of each function's fastest run; they take turns."""
    best = [float("inf")] * len(functions)
    for round_number in range(ROUNDS + 1):
        for i, function in enumerate(functions):
            if function is None:
                continue
            start = time.perf_counter()
            jax.block_until_ready(function())
            if round_number:  # the first compiles
                best[i] = min(best[i], (time.perf_counter() - start) * 1e3)
    return [None if function is None else best[i] for i, function in enumerate(functions)]


def ours(function: str, arguments: tuple[Any, Any], rest: tuple[Any, ...], module: Any) -> Callable[[], Any] | None:
    """A compiled call of one form, None if it leaves the shapes to XLA."""
    call = getattr(module, function)
    if jax.eval_shape(lambda a, b: call(a, b, *rest), *arguments) is None:
        return None
    lowered = jax.jit(lambda a, b: call(a, b, *rest)).lower(*arguments)
    compiled = lowered.compile(compiler_options=compiler_options())
    return lambda: compiled(*arguments)


def main() -> None:
    print(f"{'input':20}{'weight':18}{'':16}{'XLA':>9}{'ours':>9}{'torch':>9}")
    for x_shape, w_shape, stride, padding, groups in SHAPES:
        rank = len(w_shape) - 2
        convolve = {2: functional.conv2d, 3: functional.conv3d}[rank]
        geometry = Geometry((stride,) * rank, (padding,) * rank, (1,) * rank, groups)
        inputs, weight = torch.randn(x_shape, requires_grad=True), torch.randn(w_shape, requires_grad=True)
        output = convolve(inputs, weight, None, *geometry)
        grad = torch.randn_like(output)
        x, w, g = (jnp.asarray(t.detach().numpy()) for t in (inputs, weight, grad))

        def gradient(of: torch.Tensor, output: torch.Tensor = output, grad: torch.Tensor = grad) -> Any:
            return torch.autograd.grad(output, of, grad, retain_graph=True)[0].numpy()

        rows = [
            (
                "forward",
                (x, w),
                (geometry,),
                lambda c=convolve, i=inputs, w=weight, g=geometry: c(i, w, None, *g).detach().numpy(),
            ),
            ("input_gradient", (g, w), (geometry, x_shape[2:]), lambda i=inputs, f=gradient: f(i)),
            ("weight_gradient", (x, g), (geometry, w_shape[2:]), lambda w=weight, f=gradient: f(w)),
        ]
        for name, arguments, rest, reference in rows:
            forms = [ours(name, arguments, rest, module) for module in (convolution, convolution_cpu)]
            times = fastest([*forms, reference])
            cells = "".join(f"{'-':>9}" if t is None else f"{t:9.2f}" for t in times)
            print(f"{x_shape!s:20}{w_shape!s:18}{name:16}{cells}")


if __name__ == "__main__":
    main()
