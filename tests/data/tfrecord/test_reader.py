"""TFRecord files that TensorFlow wrote, and damaged ones. `tests/data/tfrecords/make.py` made the files."""

import json
import random
import shutil
import struct
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch

from xlatrainer import storage
from xlatrainer.data.tfrecord import TfRecordReader, TfRecordWriter, encode_example
from xlatrainer.data.tfrecord.example import ExampleParser
from xlatrainer.data.tfrecord.framing import Damage, Source, frames, masked
from xlatrainer.errors import RecordError

FILES = Path(__file__).parent.parent / "tfrecords"
EXPECTED: list[dict[str, tuple[str, list[Any]]]] = json.loads((FILES / "expected.json").read_text())


def records(path: Any, compression: str = "", **options: Any) -> list[bytes]:
    with TfRecordReader(path, compression, **options) as reader:
        found = []
        while (record := reader.read_record()) is not None:
            found.append(record)
        assert reader.read_record() is None
        return found


def write(path: Path, number: int = 3, compression: str = "") -> list[bytes]:
    data = [bytes([n]) * (10 * n) for n in range(number)]
    with TfRecordWriter(path, compression) as writer:
        for record in data:
            writer.write(record)
    return data


@pytest.mark.parametrize(
    "name", ["examples.tfrecord", "examples.zlib.tfrecord", "examples.gzip.tfrecord", "unpacked.tfrecord"]
)
def test_what_tensorflow_wrote(name: str) -> None:
    compression = name.split(".")[1].upper() if name.count(".") == 2 else ""
    parser = ExampleParser()
    for _ in range(2):  # the second time the layouts of the entries are known
        found = [parser.parse(record) for record in records(FILES / name, compression)]
        assert len(found) == len(EXPECTED)
        for example, expected in zip(found, EXPECTED, strict=True):
            assert example.keys() == expected.keys()
            for key, (kind, values) in expected.items():
                if kind in ("bytes", "none"):
                    assert example[key] == [value.encode("latin-1") for value in values]
                    continue
                dtype = np.float32 if kind == "float" else np.int64
                assert example[key].dtype == dtype
                np.testing.assert_array_equal(example[key], np.array(values, dtype))


def test_unpacked_numbers_are_in_the_file_that_says_so() -> None:
    assert len(records(FILES / "unpacked.tfrecord")[0]) > len(records(FILES / "examples.tfrecord")[0])


def test_tensors_of_features() -> None:
    with TfRecordReader(FILES / "examples.tfrecord") as reader:
        first, second, third, *_ = list(reader)
    assert first["floats"].dtype == torch.float32
    assert first["ints"].tolist() == EXPECTED[0]["ints"][1]
    assert first["image"].dtype == torch.uint8
    assert bytes(first["image"].tolist()) == EXPECTED[0]["image"][1][0].encode("latin-1")
    assert [bytes(each.tolist()) for each in second["strings"]] == [b"a", b"", b"ccc"]
    assert {name: (value if isinstance(value, list) else value.dtype) for name, value in third.items()} == {
        "no_floats": torch.float32,
        "no_ints": torch.int64,
        "no_bytes": [],
        "none": [],
    }
    first["floats"].zero_()  # a tensor of one's own


def test_sequence_examples() -> None:
    with TfRecordReader(FILES / "sequences.tfrecord", transforms={"tokens": "STR", "title": "STR"}) as reader:
        found = reader.read_sequence_example()
        assert found is not None
        context, lists = found
        assert reader.read_sequence_example() is None
    assert context == {"length": torch.tensor([3]), "title": "words"}
    assert lists["tokens"] == ["a", "bb", "ccc"]
    assert [step.tolist() for step in lists["scores"]] == [[0.5], [], [0.5, 0.5]]
    assert lists["nothing"] == []


def test_an_empty_file() -> None:
    assert records(FILES / "empty.tfrecord") == []


def test_transforms(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with TfRecordWriter(path) as writer:
        writer.write({"text": "grün", "words": ["eins", "zwei"], "number": [1, 2], "parts": [b"a", b"bc"]})
    transforms: Any = {"text": "STR", "words": "STR", "number": torch.sum, "parts": len}
    with TfRecordReader(path, transforms=transforms) as reader:
        assert reader.read_example() == {"text": "grün", "words": ["eins", "zwei"], "number": 3, "parts": [1, 2]}
    with pytest.raises(ValueError, match="Invalid transform: 'INT' for 'text'"):
        TfRecordReader(path, transforms={"text": "INT"})
    with (
        TfRecordReader(path, transforms={"number": "STR"}) as reader,
        pytest.raises(TypeError, match="'number' holds int64"),
    ):
        reader.read_example()


@pytest.mark.parametrize("compression", ["", "ZLIB", "GZIP"])
def test_any_buffer_size_gives_the_same(tmp_path: Path, compression: str) -> None:
    data = write(tmp_path / "file", 20, compression)
    for size in (1, 7, 1000, 16 << 20):
        assert records(tmp_path / "file", compression, buffer_size=size) == data
    with pytest.raises(ValueError, match="buffer_size must be at least 1"):
        TfRecordReader(tmp_path / "file", buffer_size=0)


def test_urls(bucket: str, tmp_path: Path) -> None:
    for url in (f"{bucket}/a.tfrecord", f"memory://{tmp_path.name}/a.tfrecord"):
        for compression in ("", "GZIP"):
            data = [bytes(20) * n for n in range(5)]
            with TfRecordWriter(url, compression) as writer:
                for record in data:
                    writer.write(record)
            assert records(url, compression) == data
    with pytest.raises(FileNotFoundError, match="none.tfrecord does not exist"):
        TfRecordReader(f"{bucket}/none.tfrecord")


def test_gzip_members_one_after_another(tmp_path: Path) -> None:
    data = write(tmp_path / "file", 3, "GZIP")
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(content * 2)
    assert records(tmp_path / "file", "GZIP") == data * 2


def test_damage_is_located(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = write(path, 4)
    content = path.read_bytes()
    third = 16 + 16 + 10  # where record 2, of 20 bytes, begins
    for at, what in (
        (third, "its length does not"),
        (third + 8, "its length does not"),
        (third + 15, "its data do not"),
    ):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with TfRecordReader(path) as reader:
            assert [reader.read_record(), reader.read_record()] == data[:2]
            with pytest.raises(
                RecordError, match=f"file: record 2 at byte 42 of the file is damaged: {what}"
            ) as caught:
                reader.read_record()
            assert (caught.value.path, caught.value.record, caught.value.offset) == (str(path), 2, 42)
            assert reader.read_record() is None
    for cut in (third + 3, third + 12, third + 20, third + 34):
        path.write_bytes(content[:cut])
        with pytest.raises(RecordError, match=r"record 2 at byte 42 .*(ends within|the file holds)"):
            records(path)


def test_damage_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = write(path, 4)
    content = bytearray(path.read_bytes())
    content[42 + 15] ^= 1
    path.write_bytes(content)
    with TfRecordReader(path, on_damage="skip") as reader:
        assert [reader.read_record() for _ in range(4)] == [data[0], data[1], data[3], None]
        assert reader.num_damaged == 1
    content[16] ^= 1  # the length of record 1
    path.write_bytes(content)
    with TfRecordReader(path, on_damage="skip") as reader:
        assert [reader.read_record() for _ in range(2)] == [data[0], None]
        assert reader.num_damaged == 1
    with pytest.raises(ValueError, match="on_damage='ignore'"):
        TfRecordReader(path, on_damage="ignore")  # type: ignore[arg-type]


def test_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("these are no records at all")
    with pytest.raises(RecordError, match="Is it a TFRecord file, with the compression ''"):
        records(path)
    for compression in ("GZIP", "ZLIB"):
        write(path, 3, compression)
        with pytest.raises(RecordError, match=f'give compression="{compression}"'):
            records(path)
    write(path, 3)
    for compression in ("GZIP", "ZLIB"):
        with pytest.raises(RecordError, match="cannot be decompressed"):
            records(path, compression)
    with pytest.raises(ValueError, match="compression 'LZ4' is none of"):
        TfRecordReader(path, "LZ4")


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("length", [1 << 31, 1 << 62, (1 << 64) - 1])
def test_a_huge_length_is_not_allocated(tmp_path: Path, length: int, compression: str) -> None:
    """Its checksum is right: somebody may have written it on purpose."""
    start = struct.pack("<Q", length)
    content = start + struct.pack("<I", masked(google_crc32c.value(start))) + bytes(100)
    path = tmp_path / "file"
    path.write_bytes(content if not compression else zlib.compress(content, wbits=31))
    tracemalloc.start()
    with pytest.raises(RecordError, match=r"the file holds 96 more|ends within it, after 100"):
        records(path, compression, buffer_size=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20  # a piece, and what Python needs


def test_truncated_compression(tmp_path: Path) -> None:
    for compression in ("GZIP", "ZLIB"):
        data = write(tmp_path / "file", 50, compression)
        content = (tmp_path / "file").read_bytes()
        (tmp_path / "file").write_bytes(content[: len(content) * 3 // 4])
        with TfRecordReader(tmp_path / "file", compression, buffer_size=16) as reader:
            found = []

            def read_all(reader: TfRecordReader = reader, found: list[bytes] = found) -> None:
                while (record := reader.read_record()) is not None:
                    found.append(record)

            with pytest.raises(RecordError, match=r"of the decompressed contents is damaged: .*cut short"):
                read_all()
        assert found
        assert found == data[: len(found)]


def test_no_tensorflow() -> None:
    assert "tensorflow" not in sys.modules


def test_the_parser_and_random_examples() -> None:
    """What is written is read, by a parser that has seen others with the same and with other sizes."""
    generator = random.Random(0)
    parser = ExampleParser()
    kinds: list[Any] = [
        lambda n: [
            generator.randrange(-(1 << generator.randrange(1, 63)), 1 << generator.randrange(1, 63)) for _ in range(n)
        ],
        lambda n: np.array([generator.uniform(-9, 9) for _ in range(n)], np.float32),
        lambda n: [generator.randbytes(generator.choice([0, 1, 5, 200])) for _ in range(n)],
    ]
    for _ in range(2000):
        example = {
            generator.choice(["a", "b", "label", "x" * 200]): generator.choice(kinds)(generator.choice([1, 1, 2, 70]))
            for _ in range(generator.randrange(5))
        }
        found = parser.parse(encode_example(example))
        assert found.keys() == example.keys()
        for name, values in example.items():
            if isinstance(values, list) and isinstance(values[0], bytes):
                assert found[name] == values
            else:
                np.testing.assert_array_equal(found[name], values)


def test_wanted_features_alone() -> None:
    record = encode_example({"a": 1, "b": [2.0], "c": b"3"})
    parser = ExampleParser(["b"])
    for _ in range(2):
        assert parser.parse(record).keys() == {"b"}


@pytest.mark.parametrize("record", [b"\x0a", b"\x0a\x05ab", b"\x0b", b"\x0a\x02\x0a\x09", b"\x00\x00", b"\xff" * 20])
def test_what_is_no_example(record: bytes) -> None:
    with pytest.raises(RecordError, match=r"no tf\.train\.Example"):
        ExampleParser().parse(record)


def test_a_number_that_crosses_its_end_is_found_in_a_known_layout() -> None:
    record = encode_example({"label": 5, "other": 7})
    parser = ExampleParser()
    parser.parse(record)
    damaged = bytearray(record)
    damaged[record.index(b"label") + 5 + 6] = 0x85
    with pytest.raises(RecordError):
        parser.parse(bytes(damaged))


def test_closing_closes(tmp_path: Path) -> None:
    write(tmp_path / "file")
    reader = TfRecordReader(tmp_path / "file")
    reader.close()
    with pytest.raises(ValueError, match="closed file"):
        reader.read_record()
    shutil.rmtree(tmp_path)
    with Source(FILES / "examples.tfrecord") as source:
        next(frames(source, Damage()))
    assert source.file.closed
    assert storage.exists(FILES)
