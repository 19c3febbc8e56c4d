"""Microseconds to record an operator, in chains of some hundred to some thousand of them.

Recording must cost the same for each operator, however long the chain. With `--python torch_xla=PATH`, the C++ of
torch_xla records the same chains in the same run. torchax records nothing: it runs each operator at once, which is what
its column then shows.
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contenders import add_python_argument, chosen
from benchmarks.report import finish, table

LENGTHS = (100, 1000, 4000)
NEW = 2  # the first chains of a length, which do not count

OPERATORS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + x,
    "exp": lambda x: x.exp(),
    "mul by a number": lambda x: x * 1.0001,
    "transpose": lambda x: x.t(),
    "matmul": lambda x: x @ x,
    "relu": lambda x: x.relu(),
}

# Each leaves `x`, the chain's first tensor, and `forget`, called after a chain.
PREPARATIONS = {
    "lazy": """
import xlatrainer
x, forget = torch.ones(8, 8, device="xla"), xlatrainer.sync
""",
    "torch_xla": """
import os
os.environ.setdefault("PJRT_DEVICE", "CPU")
import torch_xla
x, forget = torch.ones(8, 8, device="xla"), lambda: None
""",
    "torchax": """
import torchax
torchax.enable_globally()
x, forget = torch.ones(8, 8, device="jax"), lambda: None
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", default="lazy,torch_xla", help=f"of {', '.join(PREPARATIONS)}")
    parser.add_argument("--rounds", type=int, default=15, help=f"chains of a length, of which {NEW} do not count")
    add_python_argument(parser)


def measure(x: Any, forget: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Microseconds an operator for each chain, the median of some rounds."""
    found: dict[str, list[float]] = {}
    for name, operator in OPERATORS.items():
        found[name] = []
        for length in LENGTHS:
            seconds = []
            for _ in range(rounds):
                start = time.perf_counter()
                y = x
                for _ in range(length):
                    y = operator(y)
                seconds.append(time.perf_counter() - start)
                del y
                forget()
            found[name].append(statistics.median(seconds[NEW:]) / length * 1e6)
    return found


def _measured(peer: str, python: str, rounds: int) -> dict[str, list[float]]:
    """What `measure` finds for a peer, in a process of its own."""
    folder = str(Path(__file__).resolve().parent.parent)
    script = f"""
import json, sys
sys.path.insert(0, {folder!r})
import torch
from benchmarks.trace import measure
{PREPARATIONS[peer]}
print(json.dumps(measure(x, forget, {rounds})))
"""
    done = subprocess.run([python, "-c", script], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(options: argparse.Namespace) -> None:
    unknown = [peer for peer in options.peers.split(",") if peer not in PREPARATIONS]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)} cannot be traced; of the peers, {', '.join(PREPARATIONS)} can")
    peers = chosen(options.peers, options.python)
    numbers = {peer: _measured(peer, python, options.rounds) for peer, python in peers.items()}
    head = ["microseconds an operator", *(f"{peer}, {length}" for peer in numbers for length in LENGTHS)]
    rows = [[name, *(f"{v:.1f}" for peer in numbers.values() for v in peer[name])] for name in OPERATORS]
    print(table(head, rows))
    finish("trace", numbers, options.json, peers)
