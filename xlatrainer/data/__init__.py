"""Batches on the host."""

from xlatrainer.data.epoch_iterator import EpochIterator

__all__ = ["EpochIterator"]
