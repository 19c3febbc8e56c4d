"""Figures over many batches, kept on the device."""

from xlatrainer.metrics.accuracy import Accuracy, BinaryAccuracy, TopKAccuracy
from xlatrainer.metrics.auc import AUC
from xlatrainer.metrics.error import RootMeanSquaredError
from xlatrainer.metrics.mean import Mean, MeanMetric
from xlatrainer.metrics.metric import Metric
from xlatrainer.metrics.perplexity import Perplexity
from xlatrainer.metrics.precision_recall import F1, Precision, Recall
from xlatrainer.metrics.r2 import R2
from xlatrainer.metrics.torch_metric import TorchMetric

__all__ = [
    "AUC",
    "F1",
    "R2",
    "Accuracy",
    "BinaryAccuracy",
    "Mean",
    "MeanMetric",
    "Metric",
    "Perplexity",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "TopKAccuracy",
    "TorchMetric",
]
