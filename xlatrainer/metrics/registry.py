"""Metrics by name, from functions, of torchmetrics, or as they are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from xlatrainer.metrics.accuracy import Accuracy, BinaryAccuracy, TopKAccuracy
from xlatrainer.metrics.auc import AUC
from xlatrainer.metrics.error import RootMeanSquaredError, absolute_error, cosine_similarity, squared_error
from xlatrainer.metrics.mean import MeanMetric
from xlatrainer.metrics.metric import Metric
from xlatrainer.metrics.perplexity import Perplexity
from xlatrainer.metrics.precision_recall import F1, Precision, Recall
from xlatrainer.metrics.r2 import R2
from xlatrainer.metrics.torch_metric import TorchMetric, is_torchmetrics, metrics_of_collection

__all__ = ["METRICS", "MetricSpec", "resolve_metrics"]

MetricSpec = str | Metric | Callable[[Any, Any], Tensor]

METRICS: dict[str, Callable[[float | None], Metric]] = {
    "accuracy": Accuracy,
    "binary_accuracy": BinaryAccuracy,
    "top5_accuracy": lambda _: TopKAccuracy(),
    "precision": Precision,
    "recall": Recall,
    "f1": F1,
    "auc": AUC,
    "mae": lambda _: MeanMetric(absolute_error, "mae"),
    "mse": lambda _: MeanMetric(squared_error, "mse"),
    "rmse": lambda _: RootMeanSquaredError(),
    "r2": lambda _: R2(),
    "cosine_similarity": lambda _: MeanMetric(cosine_similarity),
    "perplexity": lambda _: Perplexity(),
}
"""By name, made with the threshold above which a single score means class 1 (None if it is not known)."""


def resolve_metrics(
    metrics: Sequence[MetricSpec], weighted: Sequence[MetricSpec] = (), *, threshold: float | None = None
) -> list[Metric]:
    """The metrics that names, functions and objects stand for.

    Args:
        metrics: Names of `METRICS`, functions (prediction, target) -> tensor, `Metric` objects, and those of
            torchmetrics, a `MetricCollection` too.
        weighted: The same, for metrics in which sample weights count. One with a name that is among `metrics` is called
            "weighted_" and that name. Default none.
        threshold: For names of metrics of one score an example, see `Accuracy`; default None, not known.

    Raises:
        ValueError: For an unknown name, and for two metrics of one name (or one named "loss").
        TypeError: For anything else, and for a weighted metric that takes no weights.

    Example:
        >>> [metric.name for metric in resolve_metrics(["accuracy", "mae"], ["accuracy"])]
        ['accuracy', 'mae', 'weighted_accuracy']
    """
    resolved = _resolve_all(metrics, threshold, "metrics")
    taken = {metric.name for metric in resolved}
    for metric in _resolve_all(weighted, threshold, "weighted_metrics"):
        if any(metric is other for other in resolved):
            raise ValueError(f"the metric object {metric.name!r} is given twice; create one for each place")
        if metric.name in taken:
            metric.name = f"weighted_{metric.name}"
        resolved.append(metric.set_weighted())
    names = ["loss", *(metric.name for metric in resolved)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two values would be logged as {name!r}; give one of the metrics another name=")
    return resolved


def _resolve_all(metrics: Sequence[MetricSpec], threshold: float | None, argument: str) -> list[Metric]:
    if isinstance(metrics, str):
        raise TypeError(f"{argument} must be a list, such as [{metrics!r}], not the string {metrics!r}")
    if is_torchmetrics(metrics, "MetricCollection"):
        return metrics_of_collection(metrics)
    if isinstance(metrics, Mapping) or not isinstance(metrics, Sequence):
        raise TypeError(f"{argument} must be a list of metrics, got {type(metrics).__name__}")
    resolved: list[Metric] = []
    for metric in metrics:
        if is_torchmetrics(metric, "MetricCollection"):
            resolved += metrics_of_collection(metric)
        else:
            resolved.append(_resolve(metric, threshold))
    return resolved


def _resolve(metric: MetricSpec, threshold: float | None) -> Metric:
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        if metric not in METRICS:
            raise ValueError(f"unknown metric {metric!r}; the names are {sorted(METRICS)}")
        return METRICS[metric](threshold)
    if isinstance(metric, type):
        raise TypeError(f"metrics must be objects, not classes: create one, {metric.__name__}(...)")
    if is_torchmetrics(metric):
        return TorchMetric(metric)
    if callable(metric):
        return MeanMetric(metric)
    raise TypeError(
        f"a metric must be one of {sorted(METRICS)}, a function (prediction, target) -> tensor, a Metric object, or "
        f"one of torchmetrics; got {metric!r}"
    )
