"""A training step with a slow loader beside the same step with its batch at hand, in one run.

The step is one program that takes about so many milliseconds on the device; the loader takes a little less for each
batch, in this process or in a worker. A loader that is hidden costs nothing: the step takes as long as it does alone.
Blocks of steps take turns, and their first batch, which nothing can hide, is not counted.

By default the device has one of the machine's cores, so that the host has others, as beside an accelerator. With all of
them for the device (`--device-cores 0`) a step is slowed by what the loader computes, hidden or not.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.report import finish, table

STEP_MS = 20.0
LOADER_MS = 15.0
BLOCK = 40
ROUNDS = 5
ROWS, WIDTH = 64, 768


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=float, default=STEP_MS, help=f"milliseconds; default {STEP_MS:g}")
    parser.add_argument("--loader", type=float, default=LOADER_MS, help=f"milliseconds; default {LOADER_MS:g}")
    parser.add_argument("--device-cores", type=int, default=1, help="of a device on the CPU; default 1, 0 for all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"blocks of {BLOCK} steps; default {ROUNDS}")


class Asleep:
    """Batches that take a while: files that are waited for, say."""

    def __init__(self, batch: Any, milliseconds: float) -> None:
        self.batch = batch
        self.milliseconds = milliseconds

    def __len__(self) -> int:
        return BLOCK

    def __iter__(self) -> Iterator[Any]:
        for _ in range(BLOCK):
            time.sleep(self.milliseconds / 1e3)
            yield self.batch


def _workers(milliseconds: float) -> Any:
    """A loader with a worker process that takes so long for a batch."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return BLOCK

        def __getitem__(self, index: int) -> Any:
            time.sleep(milliseconds / 1e3)
            return torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)

    return DataLoader(Slow(), batch_size=None, num_workers=1, persistent_workers=True)


def _training(layers: int) -> Any:
    """A function that trains on batches that are on the device, a step for each; the loop ends the steps."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(batches: Iterable[Any]) -> float:
        start = 0.0
        for number, (inputs, targets) in enumerate(batches):
            if number == 1:  # nothing hides the first batch
                start = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        return start

    return train


def _fitting(layers: int) -> Any:
    """The same by a Trainer, which places batches and ends steps itself."""
    import torch
    from torch import nn

    import xlatrainer as xla

    class Clock(xla.callbacks.Callback):
        start = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.start = time.perf_counter()

    torch.manual_seed(0)
    clock = Clock()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    trainer = xla.Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), "mse", callbacks=[clock])

    def train(batches: Iterable[Any]) -> float:
        trainer.fit(batches, verbose=0)
        return clock.start

    return train


def _milliseconds(train: Any, batches: Iterable[Any]) -> float:
    import xlatrainer as xla

    start = train(batches)
    xla.wait_device_ops()
    return (time.perf_counter() - start) / (BLOCK - 1) * 1e3


def _of_length(milliseconds: float, batch: Any) -> tuple[Any, int]:
    """A training whose step takes that long or a little longer, and its number of layers."""
    from xlatrainer.data import MpDeviceLoader, SampleGenerator

    layers = 1
    while True:
        train = _training(layers)
        batches = MpDeviceLoader(SampleGenerator(batch, BLOCK))
        train(batches)  # compiles
        found = min(_milliseconds(train, batches) for _ in range(2))
        if found > milliseconds:
            return train, layers
        layers = max(layers + 1, int(0.8 * layers * milliseconds / found))  # the first ones cost more than others


def run(options: argparse.Namespace) -> None:
    if options.device_cores:
        os.environ["PJRT_NPROC"] = str(options.device_cores)  # before XLA's client is made
    import torch

    from xlatrainer.backend import runtime
    from xlatrainer.data import MpDeviceLoader, SampleGenerator

    batch = (torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))
    with runtime.undisturbed():
        train, layers = _of_length(options.step, batch)
        slow = Asleep(batch, options.loader)
        at_hand, workers, fit = SampleGenerator(batch, BLOCK), _workers(options.loader), _fitting(layers)
        contenders: dict[str, tuple[Any, Iterable[Any]]] = {
            "alone": (train, MpDeviceLoader(at_hand)),
            "asleep": (train, MpDeviceLoader(slow)),
            "a worker": (train, MpDeviceLoader(workers)),
            "asleep, without threads": (train, _WithoutThreads(slow)),
            "fit, alone": (fit, at_hand),
            "fit, asleep": (fit, slow),
            "fit, a worker": (fit, workers),
            "fit, a worker, MpDeviceLoader": (fit, MpDeviceLoader(workers)),
        }
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)  # the worker
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.rounds + 1):
            for name, (function, batches) in contenders.items():
                taken[name].append(_milliseconds(function, batches))
    medians = {name: statistics.median(values[1:]) for name, values in taken.items()}
    print(f"A step of {layers} layers, a loader of {options.loader:g} ms a batch; blocks of {BLOCK} steps:\n")
    alone = {name: medians["fit, alone" if name.startswith("fit") else "alone"] for name in medians}
    rows = [[name, f"{value:.1f}", f"{value / alone[name]:.3f}"] for name, value in medians.items()]
    print(table(["loader", "ms a step", "of the step alone"], rows))
    finish("loader", {"milliseconds": medians, "all": taken}, options.json)


class _WithoutThreads:
    """The loop that one would write by hand: a step is ended, then the next batch is fetched."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        import xlatrainer as xla

        for inputs, targets in self.batches:
            yield inputs.to("xla"), targets.to("xla")
            xla.sync(wait=True)
