"""Peak memory of a training process on the host, beside torch eager's.

Each peer trains in a process of its own; the number is the largest resident set that the system saw of it, so it holds
the interpreter, the libraries and the compiler too. All processes import torch, whose model the weights come from.
"""

import argparse

from benchmarks import contenders
from benchmarks.contenders import chosen, running
from benchmarks.report import finish, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contenders.add_arguments(parser, peers="eager,fit")
    parser.add_argument("--steps", type=int, default=10)


def run(options: argparse.Namespace) -> None:
    peers = chosen(options.peers, options.python)
    numbers: dict[str, dict[str, float]] = {}
    for model in options.models.split(","):
        with running(peers, model) as processes:
            numbers[model] = {process.name: process.steps(options.steps)["peak_mib"] for process in processes}
    print(table(["MiB at most", *peers], [[m, *(f"{v:.0f}" for v in row.values())] for m, row in numbers.items()]))
    finish("memory", numbers, options.json, peers)
