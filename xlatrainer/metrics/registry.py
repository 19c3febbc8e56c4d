"""Metrics by name, from functions, or as they are."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from xlatrainer.metrics.accuracy import Accuracy, TopKAccuracy
from xlatrainer.metrics.error import absolute_error, squared_error
from xlatrainer.metrics.mean import MeanMetric
from xlatrainer.metrics.metric import Metric

__all__ = ["METRICS", "MetricSpec", "resolve_metrics"]

MetricSpec = str | Metric | Callable[[Any, Any], Tensor]

METRICS: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "top5_accuracy": TopKAccuracy,
    "mae": lambda: MeanMetric(absolute_error, "mae"),
    "mse": lambda: MeanMetric(squared_error, "mse"),
}


def resolve_metrics(metrics: Sequence[MetricSpec], *, threshold: float | None = None) -> list[Metric]:
    """The metrics that names, functions and objects stand for.

    Args:
        metrics: Names of `METRICS`, functions (prediction, target) -> tensor, or `Metric` objects.
        threshold: For "accuracy" with one score an example, see `Accuracy`; default None, not known.

    Raises:
        ValueError: For an unknown name, and for two metrics of one name (or one named "loss").
        TypeError: For anything else.

    Example:
        >>> [metric.name for metric in resolve_metrics(["accuracy", "mae"])]
        ['accuracy', 'mae']
    """
    if isinstance(metrics, str):
        raise TypeError(f"metrics must be a list, such as [{metrics!r}], not the string {metrics!r}")
    resolved = [_resolve(metric, threshold) for metric in metrics]
    names = ["loss", *(metric.name for metric in resolved)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two values would be logged as {name!r}; give one of the metrics another name=")
    return resolved


def _resolve(metric: MetricSpec, threshold: float | None) -> Metric:
    if isinstance(metric, Metric):
        return metric
    if metric == "accuracy":
        return Accuracy(threshold)
    if isinstance(metric, str):
        if metric not in METRICS:
            raise ValueError(f"unknown metric {metric!r}; the names are {sorted(METRICS)}")
        return METRICS[metric]()
    if isinstance(metric, type):
        raise TypeError(f"metrics must be objects, not classes: create one, {metric.__name__}(...)")
    if callable(metric):
        return MeanMetric(metric)
    raise TypeError(
        f"a metric must be one of {sorted(METRICS)}, a function (prediction, target) -> tensor, or a Metric object; "
        f"got {metric!r}"
    )
