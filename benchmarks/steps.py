"""A training step of each model, beside torch eager, torch.compile and other peers.

All peers begin with the same weights and see the same batches; the losses of their first steps are compared. They take
turns in blocks of steps, each in a process of its own; a table gives the median of the blocks and its ratio to the
faster one of eager and torch.compile.
"""

import argparse
import statistics
from typing import Any

from benchmarks import contenders
from benchmarks.contenders import Contender, chosen, running
from benchmarks.report import finish, table

COMPARED = 2  # first steps whose losses must agree; later ones part, since rounding decides maxima
TOLERANCE = 0.05  # of the losses, relative: a batch norm over 8 small images amplifies the last bit that much


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contenders.add_arguments(parser, peers="eager,inductor,lazy,fit")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each peer")
    parser.add_argument("--block", type=int, default=10, help="steps in a block")


def _agreement(processes: list[Contender]) -> None:
    reference = processes[0].answers[0]["losses"][:COMPARED]
    for process in processes[1:]:
        losses = process.answers[0]["losses"][:COMPARED]
        for mine, theirs in zip(losses, reference, strict=True):
            if abs(mine - theirs) > TOLERANCE * abs(theirs):
                raise SystemExit(f"the losses disagree: {process.name} {losses}, {processes[0].name} {reference}")


def run(options: argparse.Namespace) -> None:
    peers = chosen(options.peers, options.python)
    numbers: dict[str, Any] = {}
    rows = []
    for model in options.models.split(","):
        with running(peers, model) as processes:
            for process in processes:
                process.steps(COMPARED)  # compiles
            _agreement(processes)
            for process in processes:
                process.steps(options.block)
            seconds: dict[str, list[float]] = {process.name: [] for process in processes}
            for _ in range(options.rounds):
                for process in processes:
                    process.steps(1)  # the processor's caches are another's
                    seconds[process.name].append(process.steps(options.block)["seconds"])
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        base = min((medians[name] for name in ("eager", "inductor") if name in medians), default=None)
        cells = []
        for name in peers:
            ratio = f" ({medians[name] / base:.2f}x)" if base is not None else ""
            cells.append(f"{medians[name] * 1e3:.1f}{ratio}")
        rows.append([model, *cells])
        numbers[model] = {name: {"median_s": medians[name], "blocks_s": seconds[name]} for name in peers}
        print(f"{model}: " + ", ".join(f"{name} {cell}" for name, cell in zip(peers, cells, strict=True)), flush=True)
    print("\nMilliseconds a step, and ratio to the faster of eager and inductor:\n")
    print(table(["model", *peers], rows))
    finish("steps", numbers, options.json, peers)
