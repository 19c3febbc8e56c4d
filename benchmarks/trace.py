"""Microseconds to record an operator, in chains of some hundred to some thousand of them.

Recording must cost the same for each operator, however long the chain. With torch_xla installed in another interpreter
(`--python`), its C++ records the same chains in the same run.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.report import finish, table

LENGTHS = (100, 1000, 4000)
ROUNDS = 15

OPERATORS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + x,
    "exp": lambda x: x.exp(),
    "mul by a number": lambda x: x * 1.0001,
    "transpose": lambda x: x.t(),
    "matmul": lambda x: x @ x,
    "relu": lambda x: x.relu(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--torch-xla-python", metavar="PATH", help="an interpreter with torch_xla")


def measure(x: Any, forget: Callable[[], Any]) -> dict[str, list[float]]:
    """Microseconds an operator for each chain; the median of some rounds, of which the first, new ones do not count."""
    found: dict[str, list[float]] = {}
    for name, operator in OPERATORS.items():
        found[name] = []
        for length in LENGTHS:
            seconds = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                y = x
                for _ in range(length):
                    y = operator(y)
                seconds.append(time.perf_counter() - start)
                del y
                forget()
            found[name].append(statistics.median(seconds[2:]) / length * 1e6)
    return found


_TORCH_XLA = """
import json, sys
sys.path.insert(0, {folder!r})
import torch, torch_xla
from benchmarks.trace import measure
print(json.dumps(measure(torch.ones(8, 8, device="xla"), lambda: None)))
"""


def run(options: argparse.Namespace) -> None:
    import torch

    import xlatrainer as xla

    numbers = {"xlatrainer": measure(torch.ones(8, 8, device="xla"), xla.sync)}
    if options.torch_xla_python:
        import json
        from pathlib import Path

        script = _TORCH_XLA.format(folder=str(Path(__file__).resolve().parent.parent))
        done = subprocess.run([options.torch_xla_python, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
        numbers["torch_xla"] = json.loads(done.stdout.splitlines()[-1])
    elif "torch_xla" not in sys.modules:
        print("torch_xla is left out: --torch-xla-python names an interpreter that has it")
    head = ["microseconds an operator", *(f"{peer}, {length}" for peer in numbers for length in LENGTHS)]
    rows = [[name, *(f"{v:.1f}" for peer in numbers.values() for v in peer[name])] for name in OPERATORS]
    print(table(head, rows))
    finish("trace", numbers, options.json)
