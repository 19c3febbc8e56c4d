"""Files on this machine, in fsspec's memory and on a Google Cloud Storage server, by the same functions."""

import io
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from xlatrainer import storage


@pytest.fixture(params=["local", "file", "memory", "gs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "gs":
        return str(request.getfixturevalue("bucket"))
    if request.param == "memory":
        shutil.rmtree(tmp_path)
        return f"memory://{tmp_path.name}"
    return str(tmp_path) if request.param == "local" else f"file://{tmp_path}"


def test_what_is_written_is_read(root: str) -> None:
    path = storage.join(root, "a", "b.bin")
    for content in (b"", bytes(range(256)) * 40_000, bytearray(b"x"), memoryview(b"yz")):
        storage.write(path, content)
        assert storage.read(path) == bytes(content)
    storage.write(path, "grün")
    assert storage.read(path) == "grün".encode()
    storage.write(path, io.BytesIO(b"12" * 700_000))
    assert storage.read(path) == b"12" * 700_000
    storage.write(path, io.StringIO("text"))
    assert storage.read(path) == b"text"


def test_list_stat_and_exists(root: str) -> None:
    began = time.time()
    storage.write(storage.join(root, "f.txt"), "1234")
    storage.write(storage.join(root, "g", "h.txt"), "5")
    file, folder = storage.list_folder(root)
    assert (file.name, file.size, file.isdir) == ("f.txt", 4, False)
    assert (folder.name, folder.isdir) == ("g", True)
    assert storage.read(file.path) == b"1234"
    assert [entry.name for entry in storage.list_folder(folder.path)] == ["h.txt"]
    found = storage.stat(file.path)
    assert (found.path, found.size, found.isdir) == (file.path, 4, False)
    if found.mtime is not None:
        assert began - 60 < found.mtime < time.time() + 60
    assert storage.stat(folder.path).isdir
    assert storage.exists(file.path)
    assert storage.exists(folder.path)
    assert not storage.exists(storage.join(root, "none"))
    storage.write(storage.join(root, "i.txt"), "6")  # a listing is never an old one
    assert [entry.name for entry in storage.list_folder(root)] == ["f.txt", "g", "i.txt"]


def test_remove(root: str) -> None:
    for name in ("a/1", "a/b/2", "c"):
        storage.write(storage.join(root, *name.split("/")), name)
    storage.remove(storage.join(root, "c"))
    assert [entry.name for entry in storage.list_folder(root)] == ["a"]
    storage.remove_tree(storage.join(root, "a") + "/")
    assert not storage.exists(storage.join(root, "a"))
    for gone in (storage.remove, storage.remove_tree):
        with pytest.raises(FileNotFoundError):
            gone(storage.join(root, "a"))


def test_a_folder_is_removed_alone(root: str) -> None:
    """Not those whose names begin with its own."""
    for name in ("a/1", "ab/2", "a.txt"):
        storage.write(storage.join(root, *name.split("/")), name)
    storage.remove_tree(storage.join(root, "a"))
    assert [entry.name for entry in storage.list_folder(root)] == ["a.txt", "ab"]
    assert storage.read(storage.join(root, "ab", "2")) == b"ab/2"


def test_parts_of_files(root: str) -> None:
    path = storage.join(root, "file")
    storage.write(path, "0123456789")
    assert storage.read(path, 3, 6) == b"345"
    assert storage.read(path, 8) == b"89"
    assert storage.read(path, 8, 20) == b"89"
    assert storage.read(path, 0, 2) == b"01"


def test_what_is_missing_is_said(root: str) -> None:
    path = storage.join(root, "none", "file")
    for operation in (storage.read, storage.stat, storage.open_file):
        with pytest.raises(FileNotFoundError, match="none.file"):
            operation(path)
    with pytest.raises(FileNotFoundError):
        storage.open_file(path, "r+b")


@pytest.mark.parametrize("binary", ["", "b"])
def test_modes_of_open(root: str, binary: str) -> None:
    path = storage.join(root, "file")
    storage.make_folder(root)

    def data(text: str) -> Any:
        return text.encode() if binary else text

    def opened(mode: str) -> Any:
        return storage.open_file(path, mode + binary, None if binary else "utf-8")

    with opened("w") as file:
        file.write(data("einß\n"))
    with opened("a") as file:
        file.write(data("zwei\n"))
    with opened("r") as file:
        assert list(file) == [data("einß\n"), data("zwei\n")]
    with opened("r+") as file:
        assert file.read() == data("einß\nzwei\n")
        file.seek(0)
        file.write(data("EIN"))
        file.seek(0)
        assert file.read() == data("EINß\nzwei\n")
    assert storage.read(path).decode() == "EINß\nzwei\n"
    with pytest.raises(FileExistsError):
        opened("x")
    with opened("w+") as file:
        file.write(data("neu"))
        file.seek(0)
        assert file.read() == data("neu")
    assert storage.read(path) == b"neu"
    storage.remove(path)
    with opened("a") as file:
        file.write(data("new"))
    assert storage.read(path) == b"new"
    with pytest.raises(ValueError, match="mode 'rw"):
        opened("rw")


@pytest.mark.parametrize("scheme", ["memory", "gs"])
@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_store_gets_whole_files(scheme: str, mode: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = f"{request.getfixturevalue('bucket') if scheme == 'gs' else f'memory://{tmp_path.name}'}/file"
    storage.write(path, "old")
    content: Any = b"new" if "b" in mode else "new"

    def fail() -> None:
        with storage.open_file(path, mode) as file:
            file.write(content)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert storage.read(path) == b"old"
    with storage.open_file(path, mode) as file:
        file.write(content)
        assert storage.read(path) == b"old"
        file.flush()
        assert storage.read(path) == b"new"
        file.write(content)
    assert storage.read(path) == b"newnew"
    with storage.open_file(path, mode):
        pass
    assert storage.read(path) == b""


def test_local_files_are_replaced_by_whole_ones(tmp_path: Path) -> None:
    """Writers and a reader at once: the reader sees one of the contents, and no temporary file is left."""
    path = tmp_path / "file"
    storage.write(path, "0" * 100_000)
    writers = [
        threading.Thread(target=lambda n=n: [storage.write(path, str(n) * 100_000, flush=False) for _ in range(20)])
        for n in range(1, 4)
    ]
    for writer in writers:
        writer.start()
    seen = [storage.read(path) for _ in range(50)]
    for writer in writers:
        writer.join()
    assert all(len(content) == 100_000 and len(set(content)) == 1 for content in seen)
    assert os.listdir(tmp_path) == ["file"]


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        storage.write(tmp_path / "new" / "file", "text", makedirs=False)
    assert not (tmp_path / "new").exists()
    storage.write(tmp_path / "new" / "file", "text")
    with pytest.raises(NotADirectoryError):
        storage.list_folder(tmp_path / "new" / "file")


def test_a_url_that_pathlib_has_changed_is_refused() -> None:
    with pytest.raises(ValueError, match="give the URL as a string"):
        storage.read(Path("gs://bucket/file"))
    assert not storage.exists(fsspec.utils.stringify_path(Path("c/d")))
