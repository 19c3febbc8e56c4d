"""The first two steps of a new process: without compiled programs on disk, and with them.

The clock starts when the model is made and stops when the second step is done; imports are not counted.
"""

import argparse
import os
import tempfile

from benchmarks.contenders import OURS, PEERS, chosen, running
from benchmarks.models import BENCHMARKS
from benchmarks.report import finish, table

STEPS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", default="fit,inductor", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--models", default=",".join(BENCHMARKS), help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")


def _first_steps(peer: str, python: str, model: str, folder: str) -> float:
    # Each peer's own cache on disk, in a folder that was empty at first.
    environment = {**os.environ, "XLATRAINER_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
    with running({peer: python}, model, environment) as (contender,):
        return float(contender.steps(STEPS)["since_start"])


def run(options: argparse.Namespace) -> None:
    peers = chosen(options.peers, options.python)
    numbers: dict[str, dict[str, float]] = {}
    for model in options.models.split(","):
        numbers[model] = {}
        for peer, python in peers.items():
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold", "warm") if peer in (*OURS, "inductor") else ("cold",):
                    numbers[model][f"{peer}, {state}"] = _first_steps(peer, python, model, folder)
    columns = list(next(iter(numbers.values())))
    print("Seconds of the first two steps:\n")
    print(table(["model", *columns], [[m, *(f"{row[c]:.2f}" for c in columns)] for m, row in numbers.items()]))
    finish("compile", numbers, options.json)
