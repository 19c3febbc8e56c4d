"""Copies between the host and the device, beside a plain copy in the host's memory."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.report import finish, table

SIZES = (1, 1_000, 100_000, 10_000_000)  # elements of four bytes
ROUNDS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # it has no more of them


def _microseconds(function: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def run(options: argparse.Namespace) -> None:
    import torch

    import xlatrainer as xla

    def to_device(tensor: torch.Tensor) -> None:
        tensor.to("xla")
        xla.wait_device_ops()

    numbers = {}
    for size in SIZES:
        host = torch.randn(size)
        device = host.to("xla")
        numbers[size] = {
            "copy on the host": _microseconds(host.clone),
            "to the device": _microseconds(lambda host=host: to_device(host)),  # type: ignore[misc]
            "to the host": _microseconds(device.cpu),
        }
    columns = list(numbers[1])
    rows = [[f"{size * 4:,} bytes", *(f"{row[c]:.0f}" for c in columns)] for size, row in numbers.items()]
    print(table(["microseconds", *columns], rows))
    finish("transfer", numbers, options.json)
