"""Products of a transformer's training step, on the CPU: weight gradients, and attention with its gradient.

    python benchmarks/matmul.py

Prints for each the milliseconds of torch eager, of XLA as it chooses, and of our lowerings (see `linalg._row_major` and
`lowerings/attention.py`). Medians; run it on a quiet machine.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from xlatrainer.backend import runtime
from xlatrainer.backend.lowerings.attention import flash_attention, flash_attention_backward
from xlatrainer.backend.lowerings.linalg import mm

ROWS = 1024
FEATURES = ((768, 256), (256, 256), (1024, 256), (256, 1024))
HEADS = ((8, 8, 128, 32), (8, 8, 256, 64), (4, 8, 512, 64), (1, 12, 1024, 64))  # batch, heads, tokens, width of a head


class _LikeQuery:
    dtype = torch.float32


def milliseconds(run: Callable[[], Any], repeats: int = 30) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def compiled(function: Callable[..., Any], *arrays: np.ndarray) -> float:
    given = [jax.device_put(array) for array in arrays]
    program = jax.jit(function).lower(*given).compile(compiler_options=runtime.compiler_options())
    with runtime.undisturbed():
        return milliseconds(lambda: jax.block_until_ready(program(*given)))


def weight_gradient(grad: torch.Tensor, rows: torch.Tensor) -> str:
    arrays = grad.numpy(), rows.numpy()
    eager = milliseconds(lambda: grad.t() @ rows)
    return (
        f"torch {eager:.2f}  XLA {compiled(lambda a, b: a.T @ b, *arrays):.2f}  ours {compiled(_weight, *arrays):.2f}"
    )


def _weight(grad: jax.Array, rows: jax.Array) -> jax.Array:
    return mm(grad.T, rows)


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, grad: jax.Array) -> tuple[jax.Array, ...]:
    out, logsumexp = flash_attention(query, key, value, 0.0, True, out_specs=(_LikeQuery, _LikeQuery))
    return out, *flash_attention_backward(grad, query, key, value, out, logsumexp, 0.0, True)


def attention(shape: tuple[int, ...]) -> str:
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape)

    def eager() -> None:
        torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True).backward(grad)

    arrays = [tensor.detach().numpy() for tensor in tensors]
    return f"torch {milliseconds(eager):.2f}  ours {compiled(_attention, *arrays, grad.numpy()):.2f}"


def main() -> None:
    for out, inner in FEATURES:
        timings = weight_gradient(torch.randn(ROWS, out), torch.randn(ROWS, inner))
        print(f"weight gradient {out} x {inner}, {ROWS} rows: {timings}")
    for shape in HEADS:
        print(f"causal attention {shape}, forward and backward: {attention(shape)}")


if __name__ == "__main__":
    main()
