"""Files that appear whole or not at all, local copies, and folders that are sent."""

import os
from pathlib import Path

import pytest

from xlatrainer import storage
from xlatrainer.storage.mirror import Mirror
from xlatrainer.storage.publishing import fetched, get_file, publish_file


def test_fetched(bucket: str, tmp_path: Path) -> None:
    for root in (str(tmp_path), bucket, f"memory://{tmp_path.name}"):
        for name in ("a.bin", "b.bin", "c.txt"):
            storage.write(storage.join(root, "folder", name), name)
        with fetched(storage.join(root, "folder"), (".bin",)) as folder:
            assert {name for name in os.listdir(folder) if name.endswith(".bin")} == {"a.bin", "b.bin"}
            assert (folder / "a.bin").read_text() == "a.bin"
        with fetched(storage.join(root, "folder", "c.txt"), ()) as file:
            assert file.read_text() == "c.txt"
        with pytest.raises(FileNotFoundError, match="none does not exist"), fetched(storage.join(root, "none"), ()):
            pass


def test_a_file_that_is_not_there_leaves_no_copy(bucket: str, tmp_path: Path) -> None:
    for url in (f"{bucket}/none", f"memory://{tmp_path.name}/none"):
        with pytest.raises(FileNotFoundError):
            get_file(url, str(tmp_path / "copy"))
        assert not os.listdir(tmp_path)


def test_publish_file(bucket: str, tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("stop")

    for root in (str(tmp_path / "new"), f"{bucket}/new"):
        path = storage.join(root, "file")
        publish_file(path, lambda target: target.write_text("whole") and None)
        with pytest.raises(RuntimeError, match="stop"):
            publish_file(path, fail)
        assert storage.read(path) == b"whole"
        assert [entry.name for entry in storage.list_folder(root)] == ["file"]


def test_a_mirror_sends_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xlatrainer.storage import mirror as module

    sent = []
    real = module.put_file
    monkeypatch.setattr(module, "put_file", lambda local, path: sent.append(path) or real(local, path))
    url = f"memory://{tmp_path.name}"
    mirror = Mirror(url)
    mirror.send()
    (mirror.folder / "inner").mkdir()
    first, second = mirror.folder / "first", mirror.folder / "inner" / "second"
    first.write_text("1")
    mirror.send()
    second.write_text("2")
    mirror.send()
    assert sent == [f"{url}/first", f"{url}/inner/second"]
    first.write_text("11")
    folder = mirror.folder
    mirror.close()
    mirror.close()
    assert not folder.exists()
    assert storage.read(f"{url}/first") == b"11"
    assert storage.read(f"{url}/inner/second") == b"2"
    local = Mirror(tmp_path / "here")
    assert local.folder == tmp_path / "here"
    local.close()
    assert not local.folder.exists()
