"""`Metric`: values gathered over many batches, with the state on the device.

Owns its state, nothing of models, losses or logs. The Trainer calls `to` once, `reset` before each pass over data,
`update` once a batch, and `compute` after each `update` within the same step: the program of the step then holds the
value, and reading it later runs nothing more.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["Metric", "update_metrics"]


class Metric(ABC):
    """A figure over all the examples of a pass, right with batches of any size.

    A subclass names its state with `add_state` and changes it in `update` with tensor operations only. Reading a value
    (`item`, `float`, `if tensor`) there would stop the device in every batch.

    An `update` with a parameter `sample_weight` can leave rows out and weigh them: see `update`. One without it is
    never given batches that are padded, nor weights: the Trainer raises an error instead.

    Args:
        name: Its name in the logs.

    Attributes:
        weighted: Whether the sample weights of a batch count for it: True for those in `weighted_metrics`. Default
            False: all rows count alike, but for those that only pad a batch.

    Example:
        >>> class Largest(Metric):
        ...     def __init__(self):
        ...         super().__init__("largest")
        ...         self.add_state("value", torch.tensor(float("-inf")))
        ...
        ...     def update(self, prediction, target):
        ...         self.value = torch.maximum(self.value, prediction.max())
        ...
        ...     def compute(self):
        ...         return self.value
        >>> metric = Largest()
        >>> metric.update(torch.tensor([1.0, 3.0]), torch.zeros(2))
        >>> metric.compute()
        tensor(3.)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.weighted = False
        self._device = torch.device("cpu")
        self._initial: dict[str, Tensor] = {}

    @property
    def takes_weights(self) -> bool:
        """Whether `update` has a parameter `sample_weight`."""
        return "sample_weight" in inspect.signature(self.update).parameters

    def set_weighted(self) -> Self:
        """Let the sample weights of each batch count.

        Raises:
            TypeError: If `update` takes no `sample_weight`.
        """
        if not self.takes_weights:
            raise TypeError(
                f"the metric {self.name!r} cannot be one of weighted_metrics: its update takes no sample_weight. Pass "
                f"it in metrics, or give its update a parameter sample_weight=None"
            )
        self.weighted = True
        return self

    def add_state(self, name: str, initial: Tensor) -> None:
        """Declare the attribute `name`, a tensor that `reset` sets to `initial` (on the CPU, any shape)."""
        self._initial[name] = initial
        setattr(self, name, initial.to(self._device, copy=True))

    def to(self, device: torch.device) -> Self:
        """Keep the state on `device` from now on, and reset it."""
        self._device = device
        self.reset()
        return self

    def reset(self) -> None:
        """Set the state to its initial values.

        They are copied from the CPU and not made on the device, so that the first step after a reset has the same
        program as every other.
        """
        for name, initial in self._initial.items():
            setattr(self, name, initial.to(self._device, copy=True))

    def state_dict(self) -> dict[str, Any]:
        """The state by name, as it is on the device: tensors, and plain data in a subclass that adds some."""
        return {name: getattr(self, name) for name in self._initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; tensors may be on any device."""
        for name in self._initial:
            setattr(self, name, state[name].to(self._device, copy=True))

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take in a batch; the Trainer calls `update(prediction, target)` with both on the device.

        An update with a parameter `sample_weight` (default None: all rows count alike) may be called with one: a tensor
        of shape (rows,), or of a shape that the target's begins with. A bool one says which rows are there, the others
        pad the batch; a float one holds weights, 0 for rows that pad. What a row of weight 0 holds must not matter,
        even if it is NaN.
        """

    @abstractmethod
    def compute(self) -> Tensor:
        """The figure over all batches since `reset`: a tensor of shape (), on the device."""


def update_metrics(
    metrics: Iterable[Metric],
    prediction: Any,
    target: Any,
    sample_weight: Tensor | None = None,
    is_real: Tensor | None = None,
) -> None:
    """Give a batch to each of `metrics`, with the weights that are meant for it.

    Args:
        metrics: On the batch's device.
        prediction: The model's output.
        target: What it is compared with.
        sample_weight: The weights of the batch, see `Metric.update`; for weighted metrics only. Default None.
        is_real: For a batch that is padded, a bool tensor (rows,): False for the rows that pad it. Default None, none.

    Raises:
        TypeError: If the batch is padded and a metric's `update` takes no `sample_weight`.
    """
    weights = sample_weight
    if weights is not None and is_real is not None:
        weights = torch.where(_like(is_real, weights), weights, torch.zeros_like(weights))
    for metric in metrics:
        weight = weights if metric.weighted and weights is not None else is_real
        if weight is None:
            metric.update(prediction, target)
        elif metric.takes_weights:
            metric.update(prediction, target, sample_weight=weight)
        else:
            raise TypeError(
                f"the metric {metric.name!r} cannot leave out the rows that pad a short batch: its update takes no "
                f"sample_weight. Give it a parameter sample_weight=None, or pass pad_last_batch=False"
            )


def _like(rows: Tensor, values: Tensor) -> Tensor:
    """`rows`, shape (rows,), with as many dimensions as `values`."""
    return rows.reshape(rows.shape + (1,) * (values.dim() - rows.dim()))
