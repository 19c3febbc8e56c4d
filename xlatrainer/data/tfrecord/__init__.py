"""TFRecord files without TensorFlow: read, written, and as datasets.

framing   records in a file: lengths, checksums, compression, damage
example   Examples and SequenceExamples from their bytes
features  tensors and strings of their values
index     where the records of a file begin
reader, dataset, writer
"""

from xlatrainer.data.tfrecord.dataset import TfRecordDataset, TfRecordIterableDataset
from xlatrainer.data.tfrecord.example import parse_example, parse_sequence_example
from xlatrainer.data.tfrecord.features import Feature
from xlatrainer.data.tfrecord.reader import TfRecordReader
from xlatrainer.data.tfrecord.writer import TfRecordWriter, encode_example, encode_sequence_example

__all__ = [
    "Feature",
    "TfRecordDataset",
    "TfRecordIterableDataset",
    "TfRecordReader",
    "TfRecordWriter",
    "encode_example",
    "encode_sequence_example",
    "parse_example",
    "parse_sequence_example",
]
