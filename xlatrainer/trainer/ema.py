"""Exponential moving averages of weights: kept on the device, brought on by the update's own program."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EMA"]


class EMA:
    """Averages of a model's trainable parameters: `average = momentum * average + (1 - momentum) * parameter`.

    They begin as the parameters are at the first training. Buffers (the statistics of a batch norm) are not averaged,
    nor are parameters that are frozen at that time.

    Args:
        model: On its device.
        momentum: At least 0 and below 1; Keras's `ema_momentum`.

    Raises:
        ValueError: For another momentum.
    """

    def __init__(self, model: nn.Module, momentum: float = 0.99) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"ema_momentum must be at least 0 and below 1, got {momentum}")
        self._model = model
        self.momentum = momentum
        self.averages: dict[str, nn.Parameter] = {}
        self._averaged: dict[nn.Parameter, nn.Parameter] = {}

    @torch.no_grad()
    def start(self) -> None:
        """Begin with the parameters as they are, unless it has begun."""
        if not self.averages:
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    # A clone would share its contents with the parameter until one of them is written: with one input
                    # for both, the first step would be a program of its own.
                    self._add(name, parameter.detach() * 1)

    def _add(self, name: str, average: Tensor) -> None:
        self.averages[name] = nn.Parameter(average, requires_grad=False)
        self._averaged[self._model.get_parameter(name)] = self.averages[name]

    def pairs(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters, and the average of each."""
        return list(self._averaged), list(self._averaged.values())

    @torch.no_grad()
    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take in these parameters as they are after an update."""
        for parameter in parameters:
            average = self._averaged.get(parameter)
            if average is not None:
                average.lerp_(parameter, 1 - self.momentum)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model has its averages for the length of the block, as other Parameters: nothing is copied."""
        places = [
            (module, name, parameter)
            for module in self._model.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter in self._averaged
        ]
        try:
            for module, name, parameter in places:
                setattr(module, name, self._averaged[parameter])
            yield
        finally:
            for module, name, parameter in places:
                setattr(module, name, parameter)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Give the parameters their averages for good: for a model that is done."""
        for parameter, average in self._averaged.items():
            parameter.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """The averages by the parameters' names; empty before the first training."""
        return {name: average.detach() for name, average in self.averages.items()}

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Tensor], put_beside: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        """Go on from `state_dict`'s result, on any device.

        Args:
            state: The averages by the parameters' names.
            put_beside: Makes the copy that is kept of an average, given its parameter and a tensor of its dtype; see
                `Strategy`. Default None: a copy on the parameter's device.

        Raises:
            ValueError: If it holds names or shapes that the model does not have.
        """
        parameters = dict(self._model.named_parameters())
        for name, average in state.items():
            if name not in parameters or parameters[name].shape != average.shape:
                raise ValueError(
                    f"the saved averages hold {name!r} of shape {tuple(average.shape)}, which the model does not have; "
                    f"load them into the model that they were made of"
                )
        self.averages.clear()
        self._averaged.clear()
        for name, average in state.items():
            parameter = parameters[name]
            if put_beside is None:
                self._add(name, average.to(parameter.device, parameter.dtype, copy=True))
            else:
                self._add(name, put_beside(parameter, average.to(parameter.dtype)))
