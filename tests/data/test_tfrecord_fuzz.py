"""Files that chance has damaged: no crash, no hang, no wrong record, and no more memory than twice the file."""

import contextlib
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlatrainer.data.tfrecord import TfRecordReader, TfRecordWriter, encode_example
from xlatrainer.data.tfrecord.example import ExampleParser, parse_sequence_example
from xlatrainer.data.tfrecord.reader import OnDamage
from xlatrainer.errors import RecordError

SLACK = 1 << 20  # bytes that Python, a decompressor and the buffers need for any file
COMPRESSIONS = ("", "ZLIB", "GZIP")
RECORDS = [random.Random(n).randbytes(size) for n, size in enumerate((0, 1, 30, 5000, 200, 70_000, 3))]


def file_of(folder: Path, compression: str) -> bytes:
    path = folder / "whole.tfrecord"
    with TfRecordWriter(path, compression) as writer:
        for record in RECORDS:
            writer.write(record)
    return path.read_bytes()


def is_subsequence(found: list[bytes], whole: list[bytes]) -> bool:
    rest = iter(whole)
    return all(any(record == other for other in rest) for record in found)


def check(path: Path, content: bytes, compression: str, on_damage: OnDamage) -> None:
    """What is read of `content` are records that were written, in their order; without skipping, the first of them."""
    path.write_bytes(content)
    found: list[bytes] = []
    error = None
    with TfRecordReader(path, compression, buffer_size=1 << 16, on_damage=on_damage) as reader:
        try:
            while (record := reader.read_record()) is not None:
                found.append(record)
        except RecordError as raised:
            error = raised
    assert is_subsequence(found, RECORDS)
    if on_damage == "error":
        assert found == RECORDS[: len(found)]
    if error is not None:
        assert on_damage == "error"
        assert (error.path, error.record) == (str(path), len(found))


def damaged(content: bytes, generator: random.Random) -> bytes:
    """Some bytes changed, or the end cut off, or both."""
    changed = bytearray(content)
    for _ in range(generator.choice([0, 1, 1, 2, 8])):
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed[: generator.choice([len(changed), generator.randrange(len(changed) + 1)])])


def run(folder: Path, rounds: int) -> None:
    generator = random.Random(0)
    whole = {compression: file_of(folder, compression) for compression in COMPRESSIONS}
    path = folder / "damaged.tfrecord"
    for number in range(rounds):
        compression = COMPRESSIONS[number % 3]
        content = damaged(whole[compression], generator)
        tracemalloc.start()
        check(path, content, compression, "skip" if number % 2 else "error")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= 2 * sum(map(len, RECORDS)) + SLACK


def test_damaged_files(tmp_path: Path) -> None:
    run(tmp_path, 300)


@pytest.mark.slow
def test_ten_thousand_damaged_files(tmp_path: Path) -> None:
    run(tmp_path, 10_000)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_an_example_or_an_error(record: bytes) -> None:
    with contextlib.suppress(RecordError):
        ExampleParser().parse(record)
    with contextlib.suppress(RecordError):
        parse_sequence_example(record)


def check_damaged_examples(rounds: int) -> None:
    """A parser that knows the layouts says of a damaged record what one without any does."""
    generator = random.Random(1)
    record = encode_example(
        {"floats": [0.5] * 16, "label": 300, "small": 5, "name": "a name", "many": list(range(100))}
    )
    seasoned = ExampleParser()
    seasoned.parse(record)
    for _ in range(rounds):
        content = damaged(record, generator)
        answers = []
        for parser in (ExampleParser(), seasoned):
            try:
                values = parser.parse(content)
                answers.append({name: (type(value), repr(list(value))) for name, value in values.items()})
            except RecordError:
                answers.append({})
        assert answers[0] == answers[1]


def test_damaged_examples() -> None:
    check_damaged_examples(500)


@pytest.mark.slow
def test_ten_thousand_damaged_examples() -> None:
    check_damaged_examples(10_000)


names = st.text(max_size=8)
values = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30),
    st.lists(st.binary(max_size=30), min_size=1, max_size=5),
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(names, values, max_size=5))
def test_what_is_encoded_is_parsed(features: dict[str, list[object]]) -> None:
    parser = ExampleParser()
    for _ in range(2):
        found = parser.parse(encode_example(features))
        assert {name: list(value) for name, value in found.items()} == features
