"""Peak memory of a training process on the host, beside torch eager's.

Each peer trains in a process of its own; the number is the largest resident set that the system saw of it, so it holds
the interpreter, the libraries and the compiler too.
"""

import argparse

from benchmarks.contenders import PEERS, chosen, running
from benchmarks.models import BENCHMARKS
from benchmarks.report import finish, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", default="eager,fit", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--models", default=",".join(BENCHMARKS), help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")


def run(options: argparse.Namespace) -> None:
    peers = chosen(options.peers, options.python)
    numbers: dict[str, dict[str, float]] = {}
    for model in options.models.split(","):
        with running(peers, model) as contenders:
            numbers[model] = {contender.name: contender.steps(options.steps)["peak_mib"] for contender in contenders}
    print(table(["MiB at most", *peers], [[m, *(f"{v:.0f}" for v in row.values())] for m, row in numbers.items()]))
    finish("memory", numbers, options.json)
