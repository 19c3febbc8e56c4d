"""`TorchMetric`: a metric of torchmetrics as one of ours. The library need not be installed."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from xlatrainer.metrics.metric import Metric

__all__ = ["TorchMetric", "is_torchmetrics", "metrics_of_collection"]


class TorchMetric(Metric):
    """Updates a `torchmetrics.Metric` within the step's program; its state is on the device, its value read lazily.

    Its own `update` and `compute` are called without what torchmetrics puts around them: they count no calls, so that
    a step stays the same from batch to batch, and cache nothing. The value is in the logs; the object itself, if it is
    asked, says that it was never updated.

    On a lazy device an update must not read values. Metrics with `validate_args` do by default: create them with
    `validate_args=False`. Nor may a state be a list, which grows with each batch: metrics that keep all predictions
    take `thresholds=` (curves and areas), or are computed from what `predict` returns. The macro average of
    `MulticlassAUROC` and of its like reads a value when it is computed: it works, but every step waits for the device.
    Sample weights are not passed on, nor can rows that pad a batch be left out.

    Args:
        metric: Computes one number.
        name: Its name in the logs; default None, its class's name.

    Raises:
        ValueError: If a state is a list. Later, if it reads values on the device, or computes more than a number.
    """

    def __init__(self, metric: Any, name: str | None = None) -> None:
        super().__init__(name or type(metric).__name__)
        self.metric = metric
        metric.reset()
        for state, initial in metric.metric_state.items():
            if not isinstance(initial, Tensor):
                raise ValueError(
                    f"the metric {self.name!r} keeps a list ({state}) that grows with each batch, so that every step "
                    f"would be another program. Pass thresholds=200, say, to a curve or an area under one, or compute "
                    f"it from predict's result"
                )
            self._initial[state] = initial.detach().to("cpu", copy=True)

    def to(self, device: torch.device) -> "TorchMetric":
        if device.type != "cpu" and getattr(self.metric, "validate_args", False):
            raise ValueError(
                f"the metric {self.name!r} would read the values of every batch to validate them, and the device would "
                f"wait; create it with validate_args=False"
            )
        self.metric.to(device)
        return super().to(device)

    def reset(self) -> None:
        for state, initial in self._initial.items():
            setattr(self.metric, state, initial.to(self._device, copy=True))

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.metric, name) for name in self._initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._initial:
            setattr(self.metric, name, state[name].to(self._device, copy=True))

    @torch.no_grad()
    def update(self, prediction: Any, target: Any) -> None:
        with _deterministic():
            type(self.metric).update(self.metric, prediction, target)

    @torch.no_grad()
    def compute(self) -> Tensor:
        with _deterministic():
            value = type(self.metric).compute(self.metric)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"the metric {self.name!r} computes {shape}; a log holds one number. Choose an average that gives one "
                f"(average='macro', say)"
            )
        return value if value.dim() == 0 else value.reshape(()).clone()  # a view would be read by a program of its own


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """torch's deterministic mode, in which torchmetrics counts classes without an operator that reads values."""
    was_on, was_warning = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=was_warning or not was_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)


def is_torchmetrics(value: Any, kind: str = "Metric") -> bool:
    """Whether `value` is of torchmetrics' class `kind`, "Metric" or "MetricCollection"."""
    library = sys.modules.get("torchmetrics")  # who has an object of it has imported it
    return library is not None and isinstance(value, getattr(library, kind))


def metrics_of_collection(collection: Any) -> list[Metric]:
    """The metrics of a `MetricCollection`, under its names."""
    return [TorchMetric(metric, name) for name, metric in collection.items(copy_state=False)]
