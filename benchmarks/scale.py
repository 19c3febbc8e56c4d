"""What a step costs the framework, recorded and replayed, as a model grows and for the models of the other benchmarks.

Depth adds operators and parameters; width adds none, and must add nothing. The device is idle when a step begins, and
the time ends when the call returns: the program's start is part of it, its execution is not. The third column is a
replayed step without the start of its program, which is XLA's and jax's: what the framework itself does. In a training
it does most of that while the device is busy: the last column is how long the device is idle between two steps, from
the end of a program to the call that starts the next one; "-" where nobody sees the end, of steps that take no time.
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
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


class _Watch:
    """What happens at the starts of programs; `with` it.

    Attributes:
        starting: Seconds that each start took.
        idle: Seconds that the device had been idle before each, as far as they are known: 0 if it was busy, NaN if
            nobody saw the end of the run before.
    """

    def __init__(self) -> None:
        self.starting: list[float] = []
        self.idle: list[float] = []
        self._run, self._wait = Program.run, jax.block_until_ready
        self._latest: Any = None
        self._ended = 0.0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> "_Watch":
        watch = self

        def run(self: Program, *args: Any) -> list[Any]:
            start = time.perf_counter()
            watch.idle.append(watch._idle(start))
            results = watch._run(self, *args)
            watch.starting.append(time.perf_counter() - start)
            watch._latest, watch._ended = results[self.smallest], math.nan
            return results

        self._patches.enter_context(patch.object(Program, "run", run))
        self._patches.enter_context(patch.object(jax, "block_until_ready", self._waited))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _waited(self, arrays: Any) -> Any:
        self._wait(arrays)
        self._ended = time.perf_counter()
        return arrays

    def _idle(self, now: float) -> float:
        is_busy = self._latest is not None and not self._latest.is_deleted() and not self._latest.is_ready()
        return 0.0 if is_busy else now - self._ended


def _milliseconds(step: Callable[[], Any]) -> dict[str, float]:
    compiled = xla.compile(step)
    medians = {}
    with undisturbed(), _Watch() as watch:
        for kind, replay in (("recorded", "off"), ("replayed", "on")):
            seconds, own = [], []
            with config.override(replay=replay):
                for _ in range(ROUNDS):
                    xla.wait_device_ops()
                    watch.starting.clear()
                    start = time.perf_counter()
                    compiled()
                    seconds.append(time.perf_counter() - start)
                    own.append(seconds[-1] - sum(watch.starting))
            medians[kind] = statistics.median(seconds[4:]) * 1e3
        watch.idle.clear()
        for _ in range(ROUNDS):  # each after the other, as in a training
            compiled()
    return {**medians, "own": statistics.median(own[4:]) * 1e3, "idle": statistics.median(watch.idle[4:]) * 1e3}


def run(options: argparse.Namespace) -> None:
    cases = {f"depth {depth}": _chain(depth, options.width, options.batch) for depth in DEPTHS}
    cases[f"depth {DEPTHS[1]}, 8 times as wide"] = _chain(DEPTHS[1], options.width * 8, options.batch)
    cases |= {name: _model(benchmark) for name, benchmark in BENCHMARKS.items()}
    numbers = {name: _milliseconds(step) for name, step in cases.items()}
    texts = {
        name: ["-" if math.isnan(value) else f"{value:.2f}" for value in row.values()] for name, row in numbers.items()
    }
    rows = [[name, *text] for name, text in texts.items()]
    print("Milliseconds until the call returns:\n")
    print(table(["model", "recorded", "replayed", "of it our own", "device idle"], rows))
    finish("scale", numbers, options.json)
