"""Files appear whole or not at all; what is in them is read by `test_reader`."""

import os
from pathlib import Path
from typing import Any

import pytest

from xlatrainer import storage
from xlatrainer.data.tfrecord import TfRecordReader, TfRecordWriter


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("remote", [False, True])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, bucket: str, remote: bool, compression: str) -> None:
    folder: Any = bucket if remote else tmp_path
    path = storage.join(folder, "file")
    with TfRecordWriter(path, compression) as writer:
        writer.write(b"old")

    def fail() -> None:
        with TfRecordWriter(path, compression) as writer:
            writer.write(b"new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    with TfRecordReader(path, compression) as reader:
        assert [reader.read_record(), reader.read_record()] == [b"old", None]
    assert [entry.name for entry in storage.list_folder(folder)] == ["file"]


def test_the_file_is_there_when_it_is_closed(tmp_path: Path) -> None:
    writer = TfRecordWriter(tmp_path / "file")
    writer.write(b"data")
    assert not (tmp_path / "file").exists()
    writer.close()
    writer.close()
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").stat().st_size == 20
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"more")


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compression 'BZ2' is none of"):
        TfRecordWriter(tmp_path / "file", "BZ2")
    with pytest.raises(FileNotFoundError):
        TfRecordWriter(tmp_path / "none" / "file")
    assert not os.listdir(tmp_path)
