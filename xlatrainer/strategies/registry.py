"""Strategies by name: the one table, and the error that lists it."""

from collections.abc import Callable
from functools import partial

from torch import nn

from xlatrainer.backend import memory, runtime
from xlatrainer.strategies.ddp import DDPStrategy
from xlatrainer.strategies.fsdp import FSDPStrategy, HSDPStrategy
from xlatrainer.strategies.single import SingleDeviceStrategy
from xlatrainer.strategies.strategy import Strategy

__all__ = ["STRATEGIES", "resolve_strategy"]

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "hsdp": HSDPStrategy,
    "zero1": partial(FSDPStrategy, zero=1),
    "zero2": partial(FSDPStrategy, zero=2),
    "zero3": FSDPStrategy,
}

# Bytes that training takes for each of a parameter's: itself, its gradient, Adam's two moments; and the part of a
# device's memory that they may fill, so that there is as much again for activations.
_STATES = 4
_SHARE = 0.4


def resolve_strategy(strategy: str | Strategy, model: nn.Module | None = None) -> Strategy:
    """The strategy itself, or a new one of that name.

    Args:
        strategy: A `Strategy`; a name of `STRATEGIES`; or "auto": "single" for one device, else "ddp" if the model with
            gradients and optimizer state leaves a device room for activations, else "fsdp".
        model: For "auto".

    Raises:
        ValueError: For a name that is not in the table; the message lists those that are.
        TypeError: For anything else.

    Example:
        >>> resolve_strategy(SingleDeviceStrategy("cpu")).device
        device(type='cpu')
    """
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(
            f"strategy must be a Strategy object or one of {['auto', *STRATEGIES]}, not {type(strategy).__name__}"
        )
    name = _automatic(model) if strategy == "auto" else strategy
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; the names are {['auto', *STRATEGIES]}")
    return STRATEGIES[name]()


def _automatic(model: nn.Module | None) -> str:
    devices = len(runtime.global_devices())
    if devices == 1:
        return "single"
    size = sum(p.numel() * p.element_size() for p in model.parameters()) if model is not None else 0
    limit = memory.memory_limit()
    if limit is not None and runtime.default_device().platform == "cpu":
        limit //= devices  # they share the machine's
    return "ddp" if limit is None or size * _STATES < limit * _SHARE else "fsdp"
