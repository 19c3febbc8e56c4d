"""Train and eval mode for the length of a block, put back afterwards for each module."""

import contextlib
from collections.abc import Iterator

from torch import nn

__all__ = ["evaluating", "training"]


@contextlib.contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Put `model` into train mode.

    A model that is in train mode already is left alone, so that a part of it that was put into eval mode (a frozen
    batch norm) stays there.
    """
    with _restored(model):
        if not model.training:
            model.train()
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the whole of `model` into eval mode."""
    with _restored(model):
        model.eval()
        yield


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training
