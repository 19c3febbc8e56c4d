"""Where parameters and batches live: the interface between the Trainer and a device, or many.

A strategy owns the placement of the model and of each batch, and the end of a step. It knows nothing of losses,
metrics, callbacks or data. The Trainer asks only what is declared here, never a strategy's name; what only some
strategies can do (shard a model, skip a gradient's reduction) becomes a small interface of its own, tested with
`isinstance`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.backend.closures import step_ended
from xlatrainer.backend.replay.step import one_by_one
from xlatrainer.distributed.team import Team

__all__ = ["Step", "Strategy"]


class Step(Protocol):
    """A step that is ended by the call that makes it."""

    def __call__(self, *args: Any) -> Any:
        """Make a step; returns the function's result."""

    def many(self, batches: Sequence[tuple[Any, ...]], before_each: Callable[[int], None] | None = None) -> list[Any]:
        """Make a step with each of these tuples of arguments, in one program where that can be.

        Args:
            batches: The arguments of each step.
            before_each: Called with the number of each step before its numbers are taken, perhaps more than once: sets
                the hyperparameters of optimizers. Default None.
        """

    def memory(self) -> int | None:
        """The bytes that the program of the latest step needs on the device; None where that is not known."""


class _PlainStep:
    """Runs its function every time."""

    def __init__(self, function: Callable[..., Any], end: Callable[[], None]) -> None:
        self._function = function
        self._end = end

    def __call__(self, *args: Any) -> Any:
        result = self._function(*args)
        self._end()
        return result

    def memory(self) -> int | None:
        return None

    def many(self, batches: Sequence[tuple[Any, ...]], before_each: Callable[[int], None] | None = None) -> list[Any]:
        return one_by_one(self, batches, before_each)


class Strategy(ABC):
    """Places a model and its batches, and ends steps.

    A step is what happens between two calls of `end_step`. On a lazy device nothing has run before it, so whatever is
    recorded in a step, gradients, update and metrics alike, becomes one program.
    """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which the model's parameters and the batches are."""

    @abstractmethod
    def setup(self, model: nn.Module) -> nn.Module:
        """Place `model` and return the module to call, which may be a wrapper around it. Tied weights stay tied.

        Raises:
            ValueError: If parameters share memory in a way that would not survive.
        """

    def place_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027 - a strategy may have nothing to do
        """Bring the state of an optimizer of the model's parameters to where it belongs; by default it is there."""

    def place_like(  # noqa: B027 - as above
        self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> None:
        """Bring what is kept for each of the model's `parameters` (a sum of gradients, an average) to its place.

        By default it is there: on the device.
        """

    def put_beside(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """A copy of what is kept for one of the model's parameters, a CPU tensor of its shape, in its place.

        By default that is the parameter's device. Never is more than its part on a device.
        """
        return tensor.to(parameter.device, copy=True)

    @property
    def team(self) -> Team | None:
        """The processes that hold the model together; None if this one has all of it. By default None."""
        return None

    @property
    def batch_parts(self) -> int:
        """How many equal parts the rows of a batch are split into: they must be a multiple of it. By default 1."""
        return 1

    @property
    def process(self) -> tuple[int, int]:
        """This process's number among those that share each batch, and how many they are. By default (0, 1)."""
        return 0, 1

    def strongest(self, wish: int) -> int:
        """The largest wish of the processes that share each batch, the same in all of them; each must ask."""
        return wish

    def describe(self) -> str:
        """What lies where, and the bytes that each device holds, for people."""
        return f"everything is on {self.device}"

    def loop(self) -> AbstractContextManager[None]:
        """A context around a loop of steps, for what a device needs meanwhile; by default nothing."""
        return nullcontext()

    @abstractmethod
    def to_device(self, batch: Any) -> Any:
        """`batch` with its tensors on the device; the structure is that of `map_tensors`."""

    @abstractmethod
    def end_step(self) -> None:
        """End a step: start whatever is still to be computed. Does not wait for it."""

    def run_closures(self) -> None:
        """Run the step closures of the step that was ended, once all that counts steps knows of it."""
        step_ended()

    def compiled(self, function: Callable[..., Any], state: dict[str, Any], name: str) -> "Step":
        """`function` as a step of its own: calling it ends the step.

        Args:
            function: Records a step.
            state: All that it reads and changes besides its arguments, by name: what a strategy that does without the
                function's Python has to watch.
            name: For messages.
        """
        return _PlainStep(function, self.end_step)

    def memory_limit(self) -> int | None:
        """Bytes that a step may need on the device; None where that is not known."""
        return None

    @abstractmethod
    def is_ready(self, tensor: Tensor) -> bool:
        """Whether `tensor` could be read now without running or waiting for anything. Never blocks."""

    @abstractmethod
    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of `tensors` on the CPU, made together. Waits until they are computed."""

    @abstractmethod
    def hold(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Keep what `tensors` hold now, while later steps change them. Waits for nothing.

        Returns:
            A function that gives copies on the CPU, waits until they are computed, and may be called once, from any
            thread.
        """
