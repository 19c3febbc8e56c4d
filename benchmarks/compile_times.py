"""The first two steps of a new process: without compiled programs on disk, and with them.

Two clocks, both stopped when the second step is done: one starts when the model is made, and so counts moving it to the
device and making the optimizer too; the other starts with the call of the first step. Neither counts the import of the
peer's packages.
"""

import argparse
import tempfile

from benchmarks import contenders
from benchmarks.contenders import CACHES, chosen, running
from benchmarks.report import finish, table

STEPS = 2
CLOCKS = {"from the making of the model": "since_start", "the steps alone": "steps"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contenders.add_arguments(parser, peers="fit,inductor")


def _first_steps(peer: str, python: str, model: str, folder: str) -> dict[str, float]:
    environment = dict.fromkeys(CACHES.values(), folder)
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}
    with running({peer: python}, model, environment) as (contender,):
        answer = contender.steps(STEPS)
    return {"since_start": answer["since_start"], "steps": answer["seconds"] * STEPS}


def run(options: argparse.Namespace) -> None:
    peers = chosen(options.peers, options.python)
    numbers: dict[str, dict[str, dict[str, float]]] = {}
    for model in options.models.split(","):
        numbers[model] = {}
        for peer, python in peers.items():
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold", "warm") if peer in CACHES else ("cold",):
                    numbers[model][f"{peer}, {state}"] = _first_steps(peer, python, model, folder)
    columns = list(next(iter(numbers.values())))
    for title, clock in CLOCKS.items():
        print(f"\nSeconds of the first two steps, {title}:\n")
        rows = [[model, *(f"{row[column][clock]:.2f}" for column in columns)] for model, row in numbers.items()]
        print(table(["model", *columns], rows))
    finish("compile", numbers, options.json, peers)
