"""A small problem, and the training loop one would write by hand, to compare the Trainer with."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.strategies.single import SingleDeviceStrategy

Batches = list[tuple[Tensor, Tensor]]
ON_CPU = SingleDeviceStrategy("cpu")
DEVICES = ("cpu", "xla")


def strategy_on(device: str) -> SingleDeviceStrategy:
    return ON_CPU if device == "cpu" else SingleDeviceStrategy()


def classifier(seed: int = 1, width: int = 16) -> nn.Module:
    """(N, 8) to scores (N, 3), with a batch norm, so that train and eval mode differ.

    No bias before the norm: its gradient would be rounding errors around zero, which Adam scales up to whole steps.
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def class_batches(rows: int = 100, batch_size: int = 16, seed: int = 2) -> Batches:
    """Batches of which the last one is short, unless `batch_size` divides `rows`."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=generator)
    targets = inputs[:, :3].argmax(1)
    return list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))


def hand_written(
    model: nn.Module, make_optimizer: Callable[..., Optimizer], batches: Batches, epochs: int
) -> tuple[nn.Module, dict[str, list[float]]]:
    """A copy of `model` trained by a plain PyTorch loop, and loss and accuracy over all examples of each epoch."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    history: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for _ in range(epochs):
        model.train()
        loss_sum, right, rows = 0.0, 0, 0
        for inputs, targets in batches:
            optimizer.zero_grad()
            scores = model(inputs)
            loss = F.cross_entropy(scores, targets)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(targets)
            right += int((scores.argmax(1) == targets).sum())
            rows += len(targets)
        history["loss"].append(loss_sum / rows)
        history["accuracy"].append(right / rows)
    return model, history


def evaluated(model: nn.Module, batches: Batches) -> dict[str, float]:
    """Loss and accuracy of `model` over all examples, in eval mode."""
    model.eval()
    inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    with torch.no_grad():
        scores = model(inputs)
    accuracy = (scores.argmax(1) == targets).float().mean().item()
    return {"loss": F.cross_entropy(scores, targets).item(), "accuracy": accuracy}
