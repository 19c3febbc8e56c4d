"""Learning-rate schedules: torch's schedulers, stepped after each update or each epoch, and `WarmupCosineLR`.

A schedule changes numbers in the optimizer's param groups, which are inputs of a step's program: nothing is compiled
for them, and a replayed step sees them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

__all__ = ["SchedulerSpec", "Schedules", "WarmupCosineLR"]

OneSchedule = LRScheduler | Callable[[Any], LRScheduler]
SchedulerSpec = OneSchedule | Sequence[OneSchedule] | Mapping[str, OneSchedule] | None


class WarmupCosineLR(LRScheduler):
    """A linear rise to the optimizer's learning rate, then half a cosine down; to be stepped after each update.

    Args:
        optimizer: Whose learning rates are set.
        warmup_steps: Updates of the rise: the first has 1 / warmup_steps of the learning rate. 0 for none.
        total_steps: Updates of both together; after them the learning rate stays where it is.
        min_factor: What is left in the end, as a share of the learning rate. Default 0.

    Raises:
        ValueError: Unless 0 <= warmup_steps < total_steps.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        >>> scheduler = WarmupCosineLR(optimizer, warmup_steps=2, total_steps=6)
        >>> rates = []
        >>> for _ in range(7):
        ...     rates.append(round(scheduler.get_last_lr()[0], 2))
        ...     optimizer.step()
        ...     scheduler.step()
        >>> rates
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15, 0.0]
    """

    interval = "step"

    def __init__(self, optimizer: Optimizer, warmup_steps: int, total_steps: int, min_factor: float = 0.0) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"warmup_steps must be at least 0 and below total_steps, got {warmup_steps} and {total_steps}"
            )
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.min_factor = min_factor
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each param group for the update that comes."""
        if self.last_epoch < self.warmup_steps:
            factor = (self.last_epoch + 1) / self.warmup_steps
        else:
            done = min(1.0, (self.last_epoch - self.warmup_steps) / (self.total_steps - self.warmup_steps))
            factor = self.min_factor + (1 - self.min_factor) * (1 + math.cos(math.pi * done)) / 2
        return [base * factor for base in self.base_lrs]


class Schedules:
    """The schedulers of a Trainer.

    Args:
        spec: A scheduler of one of the optimizers, a function of the optimizer that makes one, a list of these, or a
            dict of functions by the optimizers' names. None for none.
        optimizers: The Trainer's, by name.
        interval: "step", after each update, or "epoch". None for each scheduler's own: "step" for `OneCycleLR`,
            `CyclicLR` and `WarmupCosineLR`, "epoch" for others. `ReduceLROnPlateau` is always asked after an epoch.
        monitor: The value that `ReduceLROnPlateau` looks at; None for "val_loss", without validation "loss".

    Raises:
        ValueError: For another interval, and a scheduler of an optimizer that is not the Trainer's.
        TypeError: For something that is no scheduler.
    """

    def __init__(
        self, spec: SchedulerSpec, optimizers: Mapping[str, Optimizer], interval: str | None, monitor: str | None
    ) -> None:
        if interval not in (None, "step", "epoch"):
            raise ValueError(f"scheduler_interval must be 'step', 'epoch' or None, got {interval!r}")
        self.schedulers = [_resolve(each, optimizer, optimizers) for each, optimizer in _each(spec, optimizers)]
        self._optimizers = list(optimizers.values())
        self._monitor = monitor
        self._by_step = [s for s in self.schedulers if _interval(s, interval) == "step"]
        self._by_epoch = [s for s in self.schedulers if _interval(s, interval) == "epoch"]
        self._stepped = False

    def after_update(self) -> None:
        """An update has been made."""
        self._stepped = True
        for scheduler in self._by_step:
            scheduler.step()

    def foresee(self, updates: int) -> Callable[[int], None] | None:
        """The schedules of the next updates, which are made together: a function that sets those of update i of them.

        After all of them it is to be called with their number. None if there is nothing to set.

        Raises:
            ValueError: If a learning rate is a tensor, which cannot be set for each of several updates.
        """
        if not self._by_step:
            return None
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if any(isinstance(group["lr"], Tensor) for group in groups):
            raise ValueError(
                "a learning rate that is a tensor cannot follow a schedule by steps with steps_per_execution above 1; "
                "give the optimizer a number"
            )
        settings = [_settings(groups)]
        for _ in range(updates):
            self.after_update()
            settings.append(_settings(groups))

        def set_to(update: int) -> None:
            for group, values in zip(groups, settings[update], strict=True):
                group.update(values)

        set_to(0)
        return set_to

    @property
    def may_foresee(self) -> bool:
        """Whether an update was made before: torch warns of a scheduler that is stepped before its optimizer."""
        return self._stepped or not self._by_step

    def after_epoch(self, logs: Mapping[str, float], has_validation: bool) -> None:
        """An epoch has ended with these values; `has_validation`: there are some, if not after each epoch.

        Raises:
            ValueError: If the value to monitor is not among them.
        """
        for scheduler in self._by_epoch:
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
                continue
            monitor = self._monitor or ("val_loss" if has_validation else "loss")
            if has_validation and monitor.startswith("val_") and "val_loss" not in logs:
                continue  # not after this epoch
            if monitor not in logs:
                raise ValueError(
                    f"ReduceLROnPlateau is to monitor {monitor!r}, which is not among the values of the epoch: "
                    f"{sorted(logs)}; set scheduler_monitor"
                )
            scheduler.step(logs[monitor])

    def stateful_parts(self) -> Iterator[tuple[str, LRScheduler]]:
        """The schedulers by the names that their states are saved under."""
        for index, scheduler in enumerate(self.schedulers):
            yield "scheduler" if len(self.schedulers) == 1 else f"scheduler.{index}", scheduler


def _each(spec: SchedulerSpec, optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[Any, Optimizer]]:
    if isinstance(spec, Mapping):
        for name, each in spec.items():
            if name not in optimizers:
                raise ValueError(f"there is a scheduler for the optimizer {name!r}; the names are {sorted(optimizers)}")
            yield each, optimizers[name]
    elif spec is not None:
        given = spec if isinstance(spec, list | tuple) else [spec]
        if len(optimizers) > 1 and not all(isinstance(each, LRScheduler) for each in given):
            raise ValueError(
                f"with several optimizers scheduler must be a dict by their names ({', '.join(optimizers)}), or "
                f"schedulers that hold theirs"
            )
        first = next(iter(optimizers.values()))
        yield from ((each, first) for each in given)


def _resolve(spec: Any, optimizer: Optimizer, optimizers: Mapping[str, Optimizer]) -> LRScheduler:
    scheduler = spec
    if not isinstance(spec, LRScheduler) and callable(spec):
        scheduler = spec(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"scheduler must be a torch.optim.lr_scheduler object, a function of the optimizer that returns one, a "
            f"list of these or a dict by the optimizers' names; got {scheduler!r}"
        )
    if not any(scheduler.optimizer is known for known in optimizers.values()):
        raise ValueError(
            "the scheduler belongs to another optimizer than the Trainer's: pass both, Trainer(optimizer=optimizer, "
            "scheduler=scheduler), or a function, scheduler=lambda optimizer: ..."
        )
    return scheduler


def _interval(scheduler: LRScheduler, interval: str | None) -> str:
    if isinstance(scheduler, ReduceLROnPlateau):
        return "epoch"
    own = "step" if isinstance(scheduler, OneCycleLR | CyclicLR) else getattr(scheduler, "interval", "epoch")
    return interval or str(own)


def _settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]
