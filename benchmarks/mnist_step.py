"""One training step of the MNIST recipe's network, beside torch eager and torch.compile, in turn in one run.

    python benchmarks/mnist_step.py [--batch-size 128] [--rounds 10] [--compile]

Prints the median and the fastest step of each in milliseconds, and the ratio of the medians to torch eager's. For ours
also what the step is made of: recording (Python), starting the program, and waiting for it. The machine may be shared,
so the contenders take turns, in blocks of a few steps, and only the ratios are worth comparing between runs.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xlatrainer as xla
from xlatrainer.backend.runtime import undisturbed


class ConvNet(nn.Module):
    """The network of `recipes/mnist.py`: images (N, 1, 28, 28) to log-probabilities (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 10, 5), nn.BatchNorm2d(10)
        self.conv2, self.bn2 = nn.Conv2d(10, 20, 5), nn.BatchNorm2d(20)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


STEPS_IN_BLOCK = 5


@dataclass
class Contender:
    """A way to run the step, and the seconds of its steps.

    `context` surrounds a block of steps; `steps` is how many steps one call of `step` makes.
    """

    name: str
    step: Callable[[], Any]
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    steps: int = 1
    seconds: list[float] = field(default_factory=list)

    def run_block(self) -> None:
        with self.context():
            self.step()  # not timed: the threads of the contender before are still coming to rest
            for _ in range(STEPS_IN_BLOCK // self.steps or 1):
                start = time.perf_counter()
                self.step()
                self.seconds.append((time.perf_counter() - start) / self.steps)


def eager_step(batch_size: int, device: str, compiled: bool = False) -> Callable[[], Tensor]:
    """A function that records or runs one step and returns the loss."""
    torch.manual_seed(0)
    model = ConvNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.randn(batch_size, 1, 28, 28).to(device)
    targets = torch.randint(0, 10, (batch_size,)).to(device)
    forward = torch.compile(model) if compiled else model

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.nll_loss(forward(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trainer_epoch(batch_size: int, steps: int) -> Callable[[], None]:
    """A function that trains one epoch of `steps` batches with the Trainer, transfers and metrics included."""
    torch.manual_seed(0)
    batches = [(torch.randn(batch_size, 1, 28, 28), torch.randint(0, 10, (batch_size,))) for _ in range(steps)]
    trainer = xla.Trainer(ConvNet(), "sgd", loss="nll", metrics=["accuracy"], learning_rate=0.01)

    def epoch() -> None:
        trainer.fit(batches, epochs=1, verbose=0)
        xla.wait_device_ops()

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile (it compiles for a minute)")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)

    parts: dict[str, list[float]] = {"recording": [], "starting": [], "waiting": []}
    record = eager_step(options.batch_size, "xla")

    def lazy_step() -> None:
        start = time.perf_counter()
        loss = record()
        recorded = time.perf_counter()
        xla.sync()
        started = time.perf_counter()
        loss.item()
        for name, seconds in zip(
            parts, (recorded - start, started - recorded, time.perf_counter() - started), strict=True
        ):
            parts[name].append(seconds)

    eager = eager_step(options.batch_size, "cpu")
    contenders = [
        Contender("torch eager", lambda: eager().item()),
        Contender("xlatrainer", lazy_step, undisturbed),
        Contender("Trainer.fit", trainer_epoch(options.batch_size, STEPS_IN_BLOCK), steps=STEPS_IN_BLOCK),
    ]
    if options.compile:
        compiled = eager_step(options.batch_size, "cpu", compiled=True)
        contenders.append(Contender("torch.compile", lambda: compiled().item()))

    for contender in contenders:  # compile, and warm up
        contender.run_block()
        contender.seconds.clear()
    for values in parts.values():
        values.clear()
    for _ in range(options.rounds):
        for contender in contenders:
            contender.run_block()

    base = statistics.median(contenders[0].seconds)
    print(f"{'':16}{'median ms':>10}{'fastest ms':>12}{'of eager':>10}")
    for contender in contenders:
        median = statistics.median(contender.seconds)
        print(f"{contender.name:16}{median * 1e3:10.2f}{min(contender.seconds) * 1e3:12.2f}{median / base:9.2f}x")
    print("xlatrainer's step: " + ", ".join(f"{n} {statistics.median(v) * 1e3:.2f} ms" for n, v in parts.items()))


if __name__ == "__main__":
    main()
