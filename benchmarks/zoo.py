"""A training step of models of torchvision and torch, by torch eager on the CPU and by a replayed step on the device.

    python -m benchmarks zoo [NAME ...]

Prints for each model the milliseconds of a step (SGD with momentum; medians of blocks that take turns in one process),
their ratio, and the seconds of the first three steps on the device with nothing on disk, which are the compiler's for
the most part. Any other model of torchvision may be named, too; it gets 8 images of 64 x 64. Needs torchvision.
"""

import argparse
import copy
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import xlatrainer as xla
from benchmarks.report import finish, table
from xlatrainer.optional import require

CLASSES = 10
BLOCKS, STEPS = 5, 5
WARM_UP = 3  # steps: the first compiles, two have to agree before further ones are replayed

Example = tuple[nn.Module, Tensor]


class SequenceModel(nn.Module):
    """Tokens (N, T) to class scores, by a recurrent layer's last output or a transformer's mean."""

    def __init__(self, layer: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(1000, width), layer, nn.Linear(out, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.layer(self.embedding(tokens))
        return self.head(rows[0][:, -1] if isinstance(rows, tuple) else rows.mean(1))


class UNet(nn.Module):
    """Two levels down and up again (Ronneberger et al., 2015), with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, 32), self._block(32, 64), self._block(64, 128)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)])
        self.joined = nn.ModuleList([self._block(128, 64), self._block(64, 32)])
        self.head = nn.Conv2d(32, CLASSES, 1)

    @staticmethod
    def _block(width_in: int, width: int) -> nn.Module:
        layers: list[nn.Module] = []
        for channels in (width_in, width):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.down[0](x)]
        for block in list(self.down)[1:]:
            kept.append(block(functional.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([up(x), kept.pop()], 1))
        return self.head(x).mean((2, 3))


def _of_torchvision(name: str, *shape: int, **options: Any) -> Example:
    models = require("torchvision", "this benchmark", "pip install torchvision").models
    return models.get_model(name, num_classes=CLASSES, **options), torch.randn(*shape)


def _of_sequences(layer: Callable[[], nn.Module], width: int, out: int, *shape: int) -> Example:
    return SequenceModel(layer(), width, out), torch.randint(0, 1000, shape)


_images = {
    "alexnet": (8, 3, 128, 128),
    "vgg11_bn": (4, 3, 64, 64),
    "resnet18": (4, 3, 224, 224),
    "wide_resnet50_2": (4, 3, 64, 64),
    "resnext50_32x4d": (8, 3, 64, 64),
    "regnet_y_400mf": (8, 3, 64, 64),
    "densenet121": (8, 3, 64, 64),
    "squeezenet1_1": (8, 3, 64, 64),
    "shufflenet_v2_x1_0": (8, 3, 64, 64),
    "mobilenet_v2": (8, 3, 64, 64),
    "mobilenet_v3_large": (8, 3, 64, 64),
    "efficientnet_b0": (8, 3, 64, 64),
    "convnext_tiny": (4, 3, 64, 64),
    "swin_t": (4, 3, 64, 64),
    "vit_b_16": (2, 3, 224, 224),
    "r3d_18": (2, 3, 8, 56, 56),
}
_encoder_layer = functools.partial(nn.TransformerEncoderLayer, 256, 8, 1024, batch_first=True)
MODELS: dict[str, Callable[[], Example]] = {
    **{name: functools.partial(_of_torchvision, name, *shape) for name, shape in _images.items()},
    "unet": lambda: (UNet(), torch.randn(4, 3, 64, 64)),
    "lstm": lambda: _of_sequences(functools.partial(nn.LSTM, 64, 128, 2, batch_first=True), 64, 128, 16, 64),
    "gru": lambda: _of_sequences(functools.partial(nn.GRU, 64, 128, batch_first=True), 64, 128, 16, 64),
    "transformer": lambda: _of_sequences(lambda: nn.TransformerEncoder(_encoder_layer(), 4), 256, 256, 8, 128),
}


def training_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def measured(name: str) -> tuple[float, float, float]:
    """Milliseconds of eager and of ours, and seconds of the first steps."""
    torch.manual_seed(0)
    model, inputs = MODELS.get(name, functools.partial(_of_torchvision, name, 8, 3, 64, 64))()
    targets = torch.randint(0, CLASSES, (len(inputs),))
    ours = xla.compile(training_step(copy.deepcopy(model).to("xla"), inputs.to("xla"), targets.to("xla")))
    eager = training_step(model, inputs, targets)
    for _ in range(WARM_UP):
        eager()
    start = time.perf_counter()
    for _ in range(WARM_UP):
        ours().item()
    first = time.perf_counter() - start
    times: dict[Any, list[float]] = {eager: [], ours: []}
    for _ in range(BLOCKS):
        for step, taken in times.items():
            start = time.perf_counter()
            losses = [step() for _ in range(STEPS)]
            losses[-1].item()
            taken.append((time.perf_counter() - start) / STEPS * 1e3)
    return statistics.median(times[eager]), statistics.median(times[ours]), first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one model, in this process


def _in_own_process(name: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        # torch's threads spin after an operator, on the cores that the device then needs
        settings = {"XLATRAINER_CACHE_DIR": folder, "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "benchmarks", "zoo", "--here", name]
        done = subprocess.run(command, env={**os.environ, **settings}, check=True, stdout=subprocess.PIPE, text=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(options: argparse.Namespace) -> None:
    if options.here:
        print(json.dumps(measured(options.names[0])))
        return
    numbers: dict[str, list[float]] = {}
    for name in tqdm(options.names or list(MODELS), unit="model"):
        numbers[name] = _in_own_process(name)
    rows = [
        [name, f"{eager:.1f}", f"{ours:.1f} ({ours / eager:.2f}x)", f"{first:.1f}"]
        for name, (eager, ours, first) in numbers.items()
    ]
    print(table(["model", "torch eager, ms", "ours, ms", "first three steps, s"], rows))
    finish("zoo", numbers, options.json)
