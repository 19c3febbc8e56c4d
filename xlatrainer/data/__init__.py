"""Batches on the host and on their way to the device."""

from xlatrainer.data.batch import Batch
from xlatrainer.data.cached_dataset import CachedDataset
from xlatrainer.data.device_loader import MpDeviceLoader, ParallelLoader, send_cpu_data_to_device, shard_batch
from xlatrainer.data.epoch_iterator import EpochIterator
from xlatrainer.data.synthetic import FakeImages, FnDataGenerator, SampleGenerator
from xlatrainer.nested import DataWrapper

__all__ = [
    "Batch",
    "CachedDataset",
    "DataWrapper",
    "EpochIterator",
    "FakeImages",
    "FnDataGenerator",
    "MpDeviceLoader",
    "ParallelLoader",
    "SampleGenerator",
    "send_cpu_data_to_device",
    "shard_batch",
]
