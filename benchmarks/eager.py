"""A training step in eager mode beside the same step lazily traced and replayed, in one process."""

import argparse
import statistics
import time
from typing import Any

from benchmarks.models import BENCHMARKS
from benchmarks.report import finish, table

ROUNDS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="mnist", help="comma-separated; default mnist")


def run(options: argparse.Namespace) -> None:
    numbers = {name: _milliseconds(name) for name in options.models.split(",")}
    rows = [
        [name, f"{row['eager']:.1f}", f"{row['lazy']:.1f}", f"{100 * row['lazy'] / row['eager']:.0f}%"]
        for name, row in numbers.items()
    ]
    print(table(["ms a step", "eager mode", "lazy", "speed of eager mode"], rows))
    finish("eager", numbers, options.json)


def _milliseconds(name: str) -> dict[str, float]:
    import torch.nn.functional as F

    import xlatrainer as xla

    benchmark = BENCHMARKS[name]
    model: Any = benchmark.model().to("xla")
    optimizer = benchmark.optimizer(model.parameters())
    inputs, targets = next(iter(benchmark.batches()))
    inputs, targets = inputs.to("xla"), targets.to("xla")

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        del loss
        xla.sync(wait=True)
        return (time.perf_counter() - start) * 1e3

    taken: dict[str, list[float]] = {"lazy": [], "eager": []}
    for _ in range(ROUNDS):
        for mode, times in taken.items():
            xla.eager_mode(mode == "eager")
            times.append(step())
    xla.eager_mode(False)
    return {mode: statistics.median(times[2:]) for mode, times in taken.items()}
