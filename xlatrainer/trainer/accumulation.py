"""Accumulated gradients: several micro-batches for one update, which is that of one big batch.

A micro-batch counts by its rows. Its program adds to sums on the device; the program of a group's last one adds, and
updates with the sums divided by the rows of the group, however many micro-batches that were: two programs, however
large the groups. A group that the end of the epoch cuts short is applied by a third one, without a batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.strategies.strategy import Strategy

__all__ = ["Accumulation", "GradientSums"]

_T = TypeVar("_T")


class GradientSums:
    """Sums of gradients, weighted by rows, on the device.

    Args:
        optimizers: Whose parameters' gradients are summed, those of groups that are added later too. One that never
            gets a gradient has no sum, and stays without gradient.
        strategy: Where they are kept.
    """

    def __init__(self, optimizers: Iterable[Optimizer], strategy: Strategy) -> None:
        self._optimizers = list(optimizers)
        self._strategy = strategy
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.rows = torch.zeros(()).to(strategy.device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the optimizers."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    @torch.no_grad()
    def add(self, rows: int) -> None:
        """Take in the gradients of `rows` rows and drop them."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            if parameter not in self.sums:
                # Zeros from the host: made on a lazy device, they would make the first step a program of its own.
                dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
                self._keep(parameter, torch.zeros(parameter.shape, dtype=dtype))
            self.sums[parameter].add_(parameter.grad, alpha=rows)
            parameter.grad = None
        self.rows.add_(rows)

    def _keep(self, parameter: nn.Parameter, total: Tensor) -> None:
        self.sums[parameter] = self._strategy.put_beside(parameter, total)

    def load(self, parameter: nn.Parameter, total: Tensor | None) -> None:
        """Set the sum of a parameter; None: it has none yet."""
        old = self.sums.get(parameter)
        if total is not None:
            self._keep(parameter, total)
        elif old is not None:
            self._keep(parameter, torch.zeros(old.shape, dtype=old.dtype))

    @torch.no_grad()
    def take(self) -> None:
        """Give each parameter the mean over the rows as its gradient, and start anew."""
        for parameter, total in self.sums.items():
            parameter.grad = (total / self.rows).to(parameter.dtype)
            total.zero_()
        self.rows.zero_()


class Accumulation:
    """Where in a group of micro-batches the training is.

    Kept apart from the sums, since it changes with every micro-batch, and what a compiled step can reach must not.

    Args:
        sums: Of the gradients.
        steps: Micro-batches in a group, at least 1.

    Attributes:
        steps: May be changed between two groups.
        position: How many of the group are done.
    """

    def __init__(self, sums: GradientSums, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"gradient_accumulation_steps must be at least 1, got {steps}")
        self.sums = sums
        self.steps = steps
        self.position = 0

    def runs(self, batches: Sequence[_T]) -> Iterator[tuple[bool, list[_T]]]:
        """Cut `batches` where the step changes: whether it updates, and the batches to make it with. Goes on counting.

        Example:
            >>> from xlatrainer.strategies import SingleDeviceStrategy
            >>> accumulation = Accumulation(GradientSums([], SingleDeviceStrategy("cpu")), 3)
            >>> list(accumulation.runs("abcde"))
            [(False, ['a', 'b']), (True, ['c']), (False, ['d', 'e'])]
            >>> accumulation.position
            2
        """
        waiting: list[_T] = []
        for batch in batches:
            ends = (self.position + len(waiting) + 1) % self.steps == 0
            if ends and self.steps > 1:
                yield from self._run(False, waiting)
                yield from self._run(True, [batch])
                waiting = []
            else:
                waiting = [*waiting, batch]
        yield from self._run(self.steps == 1, waiting)

    def _run(self, updates: bool, batches: list[_T]) -> Iterator[tuple[bool, list[_T]]]:
        """One run, counted when it has been made."""
        if batches:
            yield updates, batches
            self.position = (self.position + len(batches)) % self.steps

    def state_dict(self) -> dict[str, Any]:
        """The sums of a group that is not whole yet, and how much of it is done."""
        sums = [self.sums.sums.get(parameter) if self.position else None for parameter in self.sums.parameters]
        return {"position": self.position, "rows": self.sums.rows, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`'s result, on any device.

        Raises:
            ValueError: If it has another number of parameters.
        """
        parameters = self.sums.parameters
        if len(state["sums"]) != len(parameters):
            raise ValueError(
                f"the state holds gradients of {len(state['sums'])} parameters, the optimizers have {len(parameters)}; "
                f"create the Trainer with the same model and frozen parameters"
            )
        self.position = state["position"]
        self.sums.rows = state["rows"].to(self.sums.rows.device, copy=True)
        for parameter, total in zip(parameters, state["sums"], strict=True):
            self.sums.load(parameter, total)
