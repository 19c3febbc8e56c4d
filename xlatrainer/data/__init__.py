"""Batches on the host."""

from xlatrainer.data.batch import Batch
from xlatrainer.data.epoch_iterator import EpochIterator

__all__ = ["Batch", "EpochIterator"]
