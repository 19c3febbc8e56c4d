"""The names that PyTorch/XLA had for Google Cloud Storage."""

import io
import sys
from pathlib import Path

import pytest

from xlatrainer.data import gcsfs


def test_open_read_and_write(bucket: str) -> None:
    path = f"{bucket}/file"
    with gcsfs.open(path, "w", encoding="utf-8") as file:
        file.write("grün")
    with gcsfs.open(path, "rb") as file:
        assert file.read() == "grün".encode()
    for content in ("text", b"bytes", io.BytesIO(b"file")):
        gcsfs.write(path, content)
    assert gcsfs.read(path) == b"file"


def test_list_stat_and_remove(bucket: str) -> None:
    for name in ("a", "b", "c/d"):
        gcsfs.write(f"{bucket}/{name}", name)
    blobs = gcsfs.list(bucket)
    assert [(blob.path, blob.size, blob.isdir) for blob in blobs] == [
        (f"{bucket}/a", 1, False),
        (f"{bucket}/b", 1, False),
        (f"{bucket}/c", 0, True),
    ]
    blob = gcsfs.stat(f"{bucket}/c/d")
    assert isinstance(blob, gcsfs.GcsBlob)
    assert (blob.size, blob.isdir) == (3, False)
    assert blob.mtime is not None
    assert blob.mtime > 1.6e9
    gcsfs.remove(f"{bucket}/a")
    assert [blob.name for blob in gcsfs.list(bucket)] == ["b", "c"]
    with pytest.raises(FileNotFoundError):
        gcsfs.stat(f"{bucket}/a")


def test_rmtree(bucket: str) -> None:
    for name in ("a/1.txt", "a/b/2.txt", "a/3.bin", "c"):
        gcsfs.write(f"{bucket}/{name}", name)
    gcsfs.rmtree(f"{bucket}/a/*.txt")
    assert [blob.name for blob in gcsfs.list(f"{bucket}/a")] == ["3.bin"]
    gcsfs.rmtree(f"{bucket}/a")
    assert [blob.name for blob in gcsfs.list(bucket)] == ["c"]
    for gone in (f"{bucket}/a/", f"{bucket}/*.txt"):
        with pytest.raises(FileNotFoundError):
            gcsfs.rmtree(gone)


def test_rmtree_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    for name in "abc":
        gcsfs.write(f"memory://stubborn/{name}", name)
    remove = MemoryFileSystem.rm_file

    def refuse(self: MemoryFileSystem, path: str) -> None:
        if path.endswith("b"):
            raise PermissionError(path)
        remove(self, path)

    monkeypatch.setattr(MemoryFileSystem, "rm_file", refuse)
    with pytest.raises(PermissionError, match="memory://stubborn/b"):
        gcsfs.rmtree("memory://stubborn")
    assert [blob.name for blob in gcsfs.list("memory://stubborn")] == ["b"]


def test_the_generic_functions_take_both(bucket: str, tmp_path: Path) -> None:
    for path in (f"{bucket}/new/file", str(tmp_path / "new" / "file")):
        gcsfs.generic_write("grün", path, makedirs=True)
        assert gcsfs.generic_read(path) == "grün".encode()
        with gcsfs.generic_open(path, encoding="utf-8") as file:
            assert file.read() == "grün"
        gcsfs.generic_write(b"bytes", path)
        assert gcsfs.generic_read(path) == b"bytes"
    with pytest.raises(FileNotFoundError):
        gcsfs.generic_write("text", tmp_path / "other" / "file")


def test_paths() -> None:
    assert gcsfs.is_gcs_path("gs://b/x")
    for other in ("/gs://", "GS://b/x", "gs:/b", "memory://b"):
        assert not gcsfs.is_gcs_path(other)
    for function in (gcsfs.open, gcsfs.list, gcsfs.stat, gcsfs.remove, gcsfs.rmtree, gcsfs.read):
        with pytest.raises(ValueError, match="gs://BUCKET_NAME/PATH"):
            function("gs:/b")
    assert "tensorflow" not in sys.modules
