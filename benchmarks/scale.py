"""What a step costs the framework as the model grows: recording it, and replaying it.

Depth adds operators and parameters; width and batch add none, and must add nothing.
"""

import argparse
import statistics
import time
from typing import Any

from benchmarks.report import finish, table

DEPTHS = (4, 16, 64)
ROUNDS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)


def _milliseconds(depth: int, width: int, rows: int, replay: str) -> float:
    import torch
    from torch import nn

    import xlatrainer as xla
    from xlatrainer import config

    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(rows, width).to("xla")

    def step() -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = xla.compile(step)
    seconds = []
    with config.override(replay=replay):
        for _ in range(ROUNDS):
            xla.wait_device_ops()
            start = time.perf_counter()
            compiled()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[4:]) * 1e3


def run(options: argparse.Namespace) -> None:
    numbers: dict[str, dict[str, float]] = {}
    for depth in DEPTHS:
        numbers[f"depth {depth}"] = {
            kind: _milliseconds(depth, options.width, options.batch, replay)
            for kind, replay in (("recorded", "off"), ("replayed", "on"))
        }
    numbers[f"depth {DEPTHS[1]}, 8 times as wide"] = {
        kind: _milliseconds(DEPTHS[1], options.width * 8, options.batch, replay)
        for kind, replay in (("recorded", "off"), ("replayed", "on"))
    }
    rows = [[name, *(f"{value:.2f}" for value in row.values())] for name, row in numbers.items()]
    print("Milliseconds until the call returns, the program's start included:\n")
    print(table(["model", "recorded", "replayed"], rows))
    finish("scale", numbers, options.json)
