"""A peer in a process of its own: makes a model's steps when it is told to, and says how long they took.

    python benchmarks/worker.py PEER MODEL

It reads a number of steps from each line of its input and answers with a line of JSON: seconds of one step, the losses,
the process's peak memory. Peers share nothing, neither threads nor allocators nor the name of a device, and each may
have an interpreter of its own.
"""

import importlib
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.models import BENCHMARKS, Batch, Benchmark

Steps = Callable[[list[Batch]], list[float]]  # makes a step with each batch and waits; the losses, or the last of them


def _loop(
    benchmark: Benchmark, device: str, compile_model: bool = False, end: Callable[[], Any] | None = None
) -> Steps:
    torch.manual_seed(0)
    model = benchmark.model().to(device)
    optimizer = benchmark.optimizer(model.parameters())
    forward = torch.compile(model) if compile_model else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def steps(batches: list[Batch]) -> list[float]:
        losses = []
        for x, y in batches:
            losses.append(step(x, y))
            if end is not None:
                end()
        return [loss.item() for loss in losses]

    return steps


def eager(benchmark: Benchmark) -> Steps:
    return _loop(benchmark, "cpu")


def inductor(benchmark: Benchmark) -> Steps:
    return _loop(benchmark, "cpu", compile_model=True)


def lazy(benchmark: Benchmark) -> Steps:
    """A plain PyTorch loop on the `xla` device: the Python of every step runs."""
    import xlatrainer as xla
    from xlatrainer.backend.runtime import undisturbed

    steps = _loop(benchmark, "xla", end=xla.sync)

    def alone(batches: list[Batch]) -> list[float]:
        with undisturbed():
            return steps(batches)

    return alone


def fit(benchmark: Benchmark) -> Steps:
    """`Trainer.fit` over the batches, with its loss metric and all transfers."""
    import xlatrainer as xla

    torch.manual_seed(0)
    model = benchmark.model()
    trainer = xla.Trainer(model, benchmark.optimizer(model.parameters()), loss="cross_entropy")

    def steps(batches: list[Batch]) -> list[float]:
        losses: list[Any] = []

        class Keep(xla.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any) -> None:
                losses.append(logs)

        trainer.fit(batches, epochs=1, verbose=0, callbacks=[Keep()])
        xla.wait_device_ops()
        means = [each["loss"] for each in losses]  # over the steps of this call
        return [(i + 1) * mean - i * before for i, (mean, before) in enumerate(zip(means, [0.0, *means], strict=False))]

    return steps


def jax(benchmark: Benchmark) -> Steps:
    """The model written in JAX by hand: `jax_models`."""
    from benchmarks import jax_models

    torch.manual_seed(0)
    weights, statistics = jax_models.arrays(benchmark.model())
    step, state = jax_models.train_step(jax_models.MODELS[benchmark.name], benchmark.optimizer, weights, statistics)
    del weights, statistics  # the first step writes over them

    def steps(batches: list[Batch]) -> list[float]:
        nonlocal state
        losses = []
        for x, y in batches:
            state, loss = step(state, x.numpy(), y.numpy())
            losses.append(loss)
        return [float(loss) for loss in losses]

    return steps


def torch_xla(benchmark: Benchmark) -> Steps:
    import torch_xla

    return _loop(benchmark, "xla", end=torch_xla.sync)


def torchax(benchmark: Benchmark) -> Steps:
    """The torch model in a `jax.jit` of the whole step, as torchax's documentation has it."""
    from torch.func import functional_call
    from torchax import default_env, interop

    from benchmarks import jax_models

    torch.manual_seed(0)
    model = benchmark.model()
    with default_env():
        model.to("jax")

    def loss(weights: Any, statistics: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, {**weights, **statistics}, (x,)), y)

    def step(state: Any, statistics: Any, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
        weights, moments = state
        value, grads = interop.jax_value_and_grad(loss)(weights, statistics, x, y)
        return interop.call_jax(update, weights, grads, moments), value

    weights, statistics = dict(model.named_parameters()), dict(model.named_buffers())
    update, moments = jax_models.optimizer(benchmark.optimizer, interop.jax_view(weights))
    compiled = interop.jax_jit(step, kwargs_for_jax_jit={"donate_argnums": 0})
    state = weights, interop.torch_view(moments)

    def steps(batches: list[Batch]) -> list[float]:
        nonlocal state
        losses = []
        with default_env():
            for x, y in batches:
                state, value = compiled(state, statistics, x.to("jax"), y.to("jax"))
                losses.append(value)
            return [value.item() for value in losses]

    return steps


PEERS = {function.__name__: function for function in (eager, inductor, lazy, fit, jax, torch_xla, torchax)}
# Imported before the clock starts.
IMPORTS = {
    "lazy": ["xlatrainer"],
    "fit": ["xlatrainer"],
    "jax": ["benchmarks.jax_models"],
    "torch_xla": ["torch_xla"],
    "torchax": ["torchax", "benchmarks.jax_models"],
}


def main() -> None:
    peer, name = sys.argv[1:]
    warnings.simplefilter("ignore")
    benchmark = BENCHMARKS[name]
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # which torch_xla must be told
    for module in IMPORTS.get(peer, []):
        importlib.import_module(module)
    started = time.perf_counter()
    steps = PEERS[peer](benchmark)
    supply: Iterator[Batch] = benchmark.batches()
    for line in sys.stdin:
        batches = [next(supply) for _ in range(int(line))]
        start = time.perf_counter()
        losses = steps(batches)
        seconds = (time.perf_counter() - start) / len(batches)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB on Linux
        answer = {"seconds": seconds, "losses": losses, "peak_mib": peak, "since_start": time.perf_counter() - started}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
