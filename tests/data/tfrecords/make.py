"""Writes the files beside this one with TensorFlow, for the tests of the readers, which have no TensorFlow.

    python tests/data/tfrecords/make.py        # in an environment with `pip install tensorflow-cpu`

`expected.json` holds what is in them: for each file its records, each a map of names to kind and values (byte strings
as latin-1 text, floats as they print).
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

FOLDER = Path(__file__).parent
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

EXAMPLES: list[dict[str, tuple[str, list[Any]]]] = [
    {
        "floats": ("float", [0.5, -1.25, 3.0e38, 0.0]),
        "ints": ("int64", [0, 1, -1, 127, 128, 300, INT64_MIN, INT64_MAX]),
        "text": ("bytes", ["grün"]),
        "image": ("bytes", ["\x00\xff\x80 \n" * 60]),
    },
    {"one": ("int64", [7]), "many": ("int64", list(range(-50, 250, 7))), "strings": ("bytes", ["a", "", "ccc"])},
    {"no_floats": ("float", []), "no_ints": ("int64", []), "no_bytes": ("bytes", []), "none": ("none", [])},
    {},
    {"floats": ("float", [1.5, 2.5, -3.5, 4.0]), "": ("int64", [5]), "long name " * 20: ("float", [1.0])},
]


def feature(kind: str, values: list[Any]) -> tf.train.Feature:
    if kind == "float":
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    if kind == "int64":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    if kind == "bytes":
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[v.encode("latin-1") for v in values]))
    return tf.train.Feature()


def features(example: dict[str, tuple[str, list[Any]]]) -> tf.train.Features:
    return tf.train.Features(feature={name: feature(*value) for name, value in example.items()})


def unpacked(example: dict[str, tuple[str, list[Any]]]) -> bytes:
    """An Example whose numbers are not packed, as writers of proto2 had them: the schema, with packing turned off."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    for source in (tf.train.Feature.DESCRIPTOR.file, tf.train.Example.DESCRIPTOR.file):
        file = descriptor_pb2.FileDescriptorProto()
        source.CopyToProto(file)
        for message in file.message_type:
            if message.name in ("FloatList", "Int64List"):
                message.field[0].options.packed = False
        pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
    message = kind.FromString(tf.train.Example(features=features(example)).SerializeToString())
    return message.SerializeToString()


def main() -> None:
    records = [tf.train.Example(features=features(example)).SerializeToString() for example in EXAMPLES]
    for compression in ("", "ZLIB", "GZIP"):
        path = FOLDER / f"examples{'.' + compression.lower() if compression else ''}.tfrecord"
        with tf.io.TFRecordWriter(str(path), options=compression) as writer:
            for record in records:
                writer.write(record)
    with tf.io.TFRecordWriter(str(FOLDER / "unpacked.tfrecord")) as writer:
        for example in EXAMPLES:
            writer.write(unpacked(example))
    with tf.io.TFRecordWriter(str(FOLDER / "empty.tfrecord")):
        pass
    sequence = tf.train.SequenceExample(
        context=features({"length": ("int64", [3]), "title": ("bytes", ["words"])}),
        feature_lists=tf.train.FeatureLists(
            feature_list={
                "tokens": tf.train.FeatureList(feature=[feature("bytes", [word]) for word in ("a", "bb", "ccc")]),
                "scores": tf.train.FeatureList(feature=[feature("float", [0.5] * n) for n in (1, 0, 2)]),
                "nothing": tf.train.FeatureList(),
            }
        ),
    )
    with tf.io.TFRecordWriter(str(FOLDER / "sequences.tfrecord")) as writer:
        writer.write(sequence.SerializeToString())
    (FOLDER / "expected.json").write_text(json.dumps(EXAMPLES, indent=1) + "\n")
    print(tf.__version__, sorted(f"{path.name}: {path.stat().st_size}" for path in FOLDER.iterdir()))


if __name__ == "__main__":
    main()
