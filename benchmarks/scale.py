"""What a step costs the framework, recorded and replayed, as a model grows and for the models of the other benchmarks.

Depth adds operators and parameters; width adds none, and must add nothing. The device is idle when a step begins, and
the time ends when the call returns: the program's start is part of it, its execution is not. The last column is a
replayed step without the start of its program, which is XLA's and jax's: what the framework itself adds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import xlatrainer as xla
from benchmarks.models import BENCHMARKS, Benchmark
from benchmarks.report import finish, table
from xlatrainer import config
from xlatrainer.backend.program import Program
from xlatrainer.backend.runtime import undisturbed

DEPTHS = (4, 16, 64)
ROUNDS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)


def _chain(depth: int, width: int, rows: int) -> Callable[[], Any]:
    """A step of a plain network."""
    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(rows, width).to("xla")

    def step() -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _model(benchmark: Benchmark) -> Callable[[], Any]:
    model = benchmark.model().to("xla")
    optimizer = benchmark.optimizer(model.parameters())
    x, y = (tensor.to("xla") for tensor in next(benchmark.batches()))

    def step() -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _milliseconds(step: Callable[[], Any]) -> dict[str, float]:
    compiled = xla.compile(step)
    medians = {}
    starting: list[float] = []  # seconds in which programs were started
    run = Program.run

    def timed_run(self: Program, *args: Any) -> list[Any]:
        start = time.perf_counter()
        results = run(self, *args)
        starting.append(time.perf_counter() - start)
        return results

    with undisturbed(), patch.object(Program, "run", timed_run):
        for kind, replay in (("recorded", "off"), ("replayed", "on")):
            seconds, own = [], []
            with config.override(replay=replay):
                for _ in range(ROUNDS):
                    xla.wait_device_ops()
                    starting.clear()
                    start = time.perf_counter()
                    compiled()
                    seconds.append(time.perf_counter() - start)
                    own.append(seconds[-1] - sum(starting))
            medians[kind] = statistics.median(seconds[4:]) * 1e3
    return {**medians, "own": statistics.median(own[4:]) * 1e3}


def run(options: argparse.Namespace) -> None:
    cases = {f"depth {depth}": _chain(depth, options.width, options.batch) for depth in DEPTHS}
    cases[f"depth {DEPTHS[1]}, 8 times as wide"] = _chain(DEPTHS[1], options.width * 8, options.batch)
    cases |= {name: _model(benchmark) for name, benchmark in BENCHMARKS.items()}
    numbers = {name: _milliseconds(step) for name, step in cases.items()}
    rows = [[name, *(f"{value:.2f}" for value in row.values())] for name, row in numbers.items()]
    print("Milliseconds until the call returns:\n")
    print(table(["model", "recorded", "replayed", "of it our own"], rows))
    finish("scale", numbers, options.json)
