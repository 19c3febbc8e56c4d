"""Recurrent layers, forward and backward: as one loop, and as torch makes them, of one cell after another.

    XLATRAINER_CACHE_DIR=off python -m benchmarks.recurrent [LSTM GRU RNN]

Prints for each layer and length the milliseconds of torch eager on the CPU, of cells and of the loop on the device
(which for few steps is cells, too), and the seconds until their first step is done, most of which is XLA's. Medians;
run it on a quiet machine. Cells of 512 steps take minutes to compile and are left out, unless `--all` is given.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import xlatrainer as xla
from xlatrainer.backend._private_api import call_implicit_kernel

LENGTHS = (1, 8, 64, 512)
BATCH, FEATURES, HIDDEN = 16, 64, 128
MANY_CELLS = 100
aten = torch.ops.aten
OVERLOADS = {"LSTM": aten.lstm.input, "GRU": aten.gru.input, "RNN": aten.rnn_tanh.input}

Step = Callable[[], torch.Tensor]


def training_step(layer: Any, rows: torch.Tensor, run: Callable[..., Any]) -> Step:
    """A step of plain SGD, so that the program ends with writing the weights."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        loss = run(layer, rows)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_cells(layer: Any, rows: torch.Tensor) -> Any:
    """What torch makes of a layer on a device of its own."""
    state = torch.zeros(1, rows.shape[1], HIDDEN, device=rows.device)
    states = [state, state] if layer.mode == "LSTM" else state
    options = True, 1, 0.0, True, False, False
    return call_implicit_kernel(OVERLOADS[type(layer).__name__], rows, states, list(layer.parameters()), *options)


def as_called(layer: Any, rows: torch.Tensor) -> Any:
    return layer(rows)


def first(step: Step) -> float:
    start = time.perf_counter()
    step().item()
    return time.perf_counter() - start


def milliseconds(steps: dict[str, Step], rounds: int = 7, count: int = 5) -> dict[str, float]:
    """Contenders take turns, so that a machine that changes its speed changes it for all."""
    for _ in range(3):  # until steps are replayed
        for step in steps.values():
            step().item()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(count):
                loss = step()
            loss.item()
            times[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name in OVERLOADS] or list(OVERLOADS)
    for name in names:
        for length in LENGTHS:
            rows = torch.randn(length, BATCH, FEATURES)
            make = getattr(torch.nn, name)
            steps = {"torch": training_step(make(FEATURES, HIDDEN), rows, as_called)}
            ways = {"cells": by_cells, "loop": as_called}
            if length > MANY_CELLS and "--all" not in arguments:
                del ways["cells"]
            for way, run in ways.items():
                steps[way] = xla.compile(training_step(make(FEATURES, HIDDEN).to("xla"), rows.to("xla"), run))
            seconds = {way: first(steps[way]) for way in ways}
            found = milliseconds(steps)
            text = "  ".join(f"{way} {time_:.2f}" for way, time_ in found.items())
            print(
                f"{name} of {length} steps: {text} ms; first step "
                + "  ".join(f"{way} {time_:.1f}" for way, time_ in seconds.items())
                + " s",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
