"""Figures over many batches, kept on the device."""

from xlatrainer.metrics.accuracy import Accuracy, TopKAccuracy
from xlatrainer.metrics.mean import Mean, MeanMetric
from xlatrainer.metrics.metric import Metric

__all__ = ["Accuracy", "Mean", "MeanMetric", "Metric", "TopKAccuracy"]
