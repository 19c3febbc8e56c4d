"""Batches on the host and on their way to the device; the files that they come from, and those that keep tensors."""

from xlatrainer.data import gcsfs, images, serialization
from xlatrainer.data.batch import Batch
from xlatrainer.data.cached_dataset import CachedDataset
from xlatrainer.data.device_loader import MpDeviceLoader, ParallelLoader, send_cpu_data_to_device, shard_batch
from xlatrainer.data.epoch_iterator import EpochIterator
from xlatrainer.data.saving import save
from xlatrainer.data.synthetic import FakeImages, FnDataGenerator, SampleGenerator
from xlatrainer.data.tfrecord.dataset import TfRecordDataset, TfRecordIterableDataset
from xlatrainer.data.tfrecord.features import Feature
from xlatrainer.data.tfrecord.reader import TfRecordReader
from xlatrainer.data.tfrecord.writer import TfRecordWriter
from xlatrainer.nested import DataWrapper

__all__ = [
    "Batch",
    "CachedDataset",
    "DataWrapper",
    "EpochIterator",
    "FakeImages",
    "Feature",
    "FnDataGenerator",
    "MpDeviceLoader",
    "ParallelLoader",
    "SampleGenerator",
    "TfRecordDataset",
    "TfRecordIterableDataset",
    "TfRecordReader",
    "TfRecordWriter",
    "gcsfs",
    "images",
    "save",
    "send_cpu_data_to_device",
    "serialization",
    "shard_batch",
]
