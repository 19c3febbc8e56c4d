"""A dataset kept in files: made once, checked on reading, filled by many at once, readable without its source."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import xlatrainer as xla
from xlatrainer import storage
from xlatrainer.data import cached_dataset
from xlatrainer.data.cached_dataset import CachedDataset
from xlatrainer.data.device_loader import MpDeviceLoader
from xlatrainer.errors import CachedSampleError


class Counting(Dataset[Any]):
    """Samples that tell their index, and a note of each that was made in this process."""

    def __init__(self, count: int = 25) -> None:
        self.count = count
        self.made: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        self.made.append(index)
        # No carriage return at the end, which the storage emulator strips from what it is sent.
        return {"image": torch.full((3, 4), index + 32, dtype=torch.uint8), "label": index, "name": f"image {index}"}


def files(folder: Any) -> dict[str, bytes]:
    """What is in a folder, METADATA left out, by relative path."""
    root = Path(folder)
    paths = [path for path in root.rglob("*") if path.is_file() and path.name != "METADATA"]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.fixture(params=["local", "memory", "gs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "gs":
        return str(request.getfixturevalue("bucket"))
    if request.param == "memory":
        shutil.rmtree(tmp_path)
        return f"memory://{tmp_path.name}"
    return str(tmp_path)


def check(sample: Any, index: int) -> None:
    assert torch.equal(sample["image"], torch.full((3, 4), index + 32, dtype=torch.uint8))
    assert (sample["label"], sample["name"]) == (index, f"image {index}")


@pytest.mark.parametrize("compress", [True, False])
def test_each_sample_is_made_once(root: str, compress: bool) -> None:
    source = Counting(5)
    cached = CachedDataset(source, storage.join(root, "cache"), compress=compress)
    assert len(cached) == 5
    for _ in range(2):
        for index in (3, 0, -1):
            check(cached[index], index % 5)
    assert source.made == [3, 0, 4]
    cached.warmup(progress=False)
    assert source.made == [3, 0, 4, 1, 2]
    again = CachedDataset(source, storage.join(root, "cache"), compress=compress)
    alone = CachedDataset(None, storage.join(root, "cache"), max_files_per_folder=3)
    for index in range(5):
        check(again[index], index)
        check(alone[np.int64(index)], index)
    assert len(source.made) == 5
    assert json.loads(storage.read(storage.join(root, "cache", "METADATA"))) == {
        "version": 1,
        "count": 5,
        "compress": compress,
        "max_files_per_folder": 1000,
    }


def test_indices_out_of_range(tmp_path: Path) -> None:
    cached = CachedDataset(Counting(3), tmp_path)
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"there are 3 samples; there is none of index {index}"):
            cached[index]
    with pytest.raises(TypeError):
        cached["1"]  # type: ignore[index]
    assert [sample["label"] for sample in cached] == [0, 1, 2]


def test_no_folder_is_fuller_than_it_may_be(tmp_path: Path) -> None:
    cached = CachedDataset(list(range(1234)), tmp_path, max_files_per_folder=10)
    assert cached.file_of(1233) == str(tmp_path / "1" / "2" / "3" / "3.sample")
    assert cached.file_of(7) == str(tmp_path / "0" / "0" / "0" / "7.sample")
    assert len({cached.file_of(number) for number in range(1234)}) == 1234
    small = CachedDataset(list(range(25)), tmp_path / "small", max_files_per_folder=10)
    small.warmup(progress=False)
    sizes = {folder.name: len(list(folder.iterdir())) for folder in (tmp_path / "small").iterdir() if folder.is_dir()}
    assert sizes == {"0": 10, "1": 10, "2": 5}
    few = CachedDataset(list(range(2)), tmp_path / "few")
    assert few.file_of(1) == str(tmp_path / "few" / "000" / "001.sample")


def test_it_can_be_taken_elsewhere(tmp_path: Path) -> None:
    CachedDataset(Counting(), tmp_path / "first").warmup(progress=False)
    with tarfile.open(tmp_path / "cache.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "first", "cache")
    with tarfile.open(tmp_path / "cache.tar.gz") as archive:
        archive.extractall(tmp_path / "second", filter="data")
    there = CachedDataset(None, tmp_path / "second" / "cache")
    for index in range(25):
        check(there[index], index)
    os.remove(there.file_of(7))
    with pytest.raises(
        CachedSampleError, match=r"Source dataset not provided and sample 7 is missing from cache folder .*second"
    ):
        there[7]


DAMAGES = {
    "flipped": lambda content: content[:60] + bytes([content[60] ^ 1]) + content[61:],
    "cut": lambda content: content[:-3],
    "empty": lambda content: b"",
    "other": lambda content: b"\x80\x04\x95" + content,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_sample_is_made_anew_or_named(damage: str, tmp_path: Path) -> None:
    source = Counting()
    cached = CachedDataset(source, tmp_path)
    cached.warmup(progress=False)
    source.made.clear()
    file = Path(cached.file_of(4))
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    with pytest.raises(CachedSampleError, match=rf"sample 4 cannot be read from {file}: it"):
        CachedDataset(None, tmp_path)[4]
    with pytest.warns(UserWarning, match=rf"sample 4 is made anew, since {file} is damaged: it"):
        check(cached[4], 4)
    assert source.made == [4]
    assert file.read_bytes() == whole
    check(CachedDataset(None, tmp_path)[4], 4)


def test_another_samples_file_is_not_taken_for_it(tmp_path: Path) -> None:
    cached = CachedDataset(Counting(), tmp_path)
    cached.warmup(progress=False)
    shutil.copy(cached.file_of(3), cached.file_of(4))
    with pytest.raises(CachedSampleError, match="it is the file of sample 3"):
        CachedDataset(None, tmp_path)[4]


def test_nothing_in_a_cache_is_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "executed"),))

    cached = CachedDataset(Counting(), tmp_path / "cache")
    cached.warmup(progress=False)
    torch.save(Evil(), cached.file_of(0))
    with pytest.raises(CachedSampleError, match="it is no file of a cached sample"):
        CachedDataset(None, tmp_path / "cache")[0]
    assert not (tmp_path / "executed").exists()


@dataclass
class Custom:
    value: int


def test_samples_that_cannot_be_kept(tmp_path: Path) -> None:
    cached = CachedDataset([1, Custom(2)], tmp_path)
    assert cached[0] == 1
    for _ in range(2):
        with pytest.raises(TypeError, match=r"sample 1 of list is a Custom, which cannot be saved"):
            cached[1]
    assert list(files(tmp_path)) == ["000/000.sample"]


def test_the_cache_of_another_dataset_is_refused(tmp_path: Path) -> None:
    CachedDataset(Counting(3), tmp_path)
    with pytest.raises(ValueError, match=r"is of a dataset with 3 samples, this one has 4"):
        CachedDataset(Counting(4), tmp_path)
    with pytest.raises(ValueError, match="was made with max_files_per_folder=1000: pass that, or another folder"):
        CachedDataset(Counting(3), tmp_path, 10)
    with pytest.raises(ValueError, match="was made with compress=True: pass that"):
        CachedDataset(Counting(3), tmp_path, compress=False)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", CachedSampleError, "METADATA is damaged: it should be JSON with version, count, compress"),
        ("[1]", CachedSampleError, "METADATA is damaged"),
        ('{"version": 1, "count": "3", "compress": true, "max_files_per_folder": 9}', CachedSampleError, "is damaged"),
        ('{"version": 1, "count": -3, "compress": true, "max_files_per_folder": 9}', CachedSampleError, "is damaged"),
        ('{"version": 1, "count": 3, "compress": true, "max_files_per_folder": 1}', CachedSampleError, "is damaged"),
        ('{"version": 2, "count": 3, "compress": true, "max_files_per_folder": 9}', ValueError, "of version 2; this"),
    ],
)
def test_metadata_that_cannot_be_used(content: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text(content)
    for source in (None, Counting(3)):
        with pytest.raises(error, match=message):
            CachedDataset(source, tmp_path)


def test_what_is_no_cache_and_no_dataset(tmp_path: Path) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(FileNotFoundError, match="there is no .*METADATA, and so no cache to read from"):
        CachedDataset(None, tmp_path)
    with pytest.raises(TypeError, match="a dataset with a length and with samples by number is needed, got Stream"):
        CachedDataset(Stream(), tmp_path)
    with pytest.raises(ValueError, match="the dataset has no samples"):
        CachedDataset([], tmp_path)
    for number in (0, 1):
        with pytest.raises(ValueError, match="max_files_per_folder must be at least"):
            CachedDataset([1], tmp_path, number)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full one is read; a missing sample is an error that names it. (As root, no folder would refuse.)"""
    source = Counting(3)
    CachedDataset(source, tmp_path)[0]

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cached_dataset, "write", refuse)
    cached = CachedDataset(source, tmp_path)
    check(cached[0], 0)
    with pytest.raises(PermissionError, match=r"Permission denied: .*001\.sample") as caught:
        cached[1]
    assert "sample 1 is not in the cache yet and could not be written" in caught.value.__notes__[0]


def test_errors_of_the_dataset_are_its_own(tmp_path: Path) -> None:
    class Failing(Counting):
        def __getitem__(self, index: int) -> Any:
            raise LookupError(f"no image {index}")

    with pytest.raises(LookupError, match="no image 2"):
        CachedDataset(Failing(), tmp_path)[2]
    assert files(tmp_path) == {}


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CachedDataset(Counting(), tmp_path).warmup()
    assert "25/25" in capsys.readouterr().err
    CachedDataset(Counting(), tmp_path).warmup(progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.multiprocess
def test_warmup_by_workers(root: str) -> None:
    if root.startswith("memory"):
        pytest.skip("each process has a memory of its own")
    source = Counting()
    CachedDataset(source, root).warmup(num_workers=2, progress=False)
    assert source.made == []
    alone = CachedDataset(None, root)
    for index in range(25):
        check(alone[index], index)
    storage.remove(alone.file_of(3))
    with pytest.raises(CachedSampleError, match="(?s)in DataLoader worker process.*sample 3 is missing"):
        alone.warmup(num_workers=2, progress=False)


def _read_all(folder: Path, seed: int) -> None:
    cached = CachedDataset(Counting(60), folder, 10)
    for index in random.Random(seed).sample(range(60), 60):
        check(cached[index], index)


@pytest.mark.multiprocess
def test_many_fill_it_at_once(tmp_path: Path) -> None:
    """Four processes, each in an order of its own, while two workers of a DataLoader read and files are taken away."""
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_read_all, args=(tmp_path, seed)) for seed in range(4)]
    for other in others:
        other.start()
    cached = CachedDataset(Counting(60), tmp_path, 10)
    loader = DataLoader(cached, 4, shuffle=True, num_workers=2)
    labels = [label for batch in loader for label in batch["label"].tolist()]
    assert sorted(labels) == list(range(60))
    while any(other.is_alive() for other in others):
        for path in tmp_path.glob("3/*.sample"):
            path.unlink(missing_ok=True)  # so that there is something to be made again
    assert [other.exitcode for other in others] == [0] * 4
    cached.warmup(progress=False)
    assert sorted(files(tmp_path)) == [f"{number // 10}/{number % 10}.sample" for number in range(60)]
    _read_all(tmp_path, 9)


@pytest.mark.multiprocess
def test_a_killed_process_leaves_nothing_that_counts(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        cached = CachedDataset(Counting(), tmp_path)
        cached[0]
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        cached[1]
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(files(tmp_path)) == 2
    source = Counting()
    cached = CachedDataset(source, tmp_path)
    cached.warmup(progress=False)
    assert source.made == list(range(1, 25))
    assert sorted(files(tmp_path)) == [f"000/{number:03}.sample" for number in range(25)]


def test_what_is_known_of_the_order(tmp_path: Path) -> None:
    sure = CachedDataset(TensorDataset(torch.arange(3)), tmp_path / "sure")
    unsure = CachedDataset(Counting(3), tmp_path / "unsure")
    assert (sure.is_deterministic, unsure.is_deterministic) == (True, False)
    assert CachedDataset(None, tmp_path / "unsure").is_deterministic


@pytest.mark.multiprocess
def test_a_trainer_trains_on_it(tmp_path: Path) -> None:
    rows = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))

    def fitted(dataset: Any, workers: int = 0) -> Any:
        torch.manual_seed(0)
        loader = DataLoader(dataset, 8, shuffle=True, num_workers=workers)
        torch.manual_seed(0)
        trainer = xla.Trainer(nn.Linear(4, 2), "sgd", "mse")
        torch.manual_seed(0)
        return trainer.fit(MpDeviceLoader(loader) if workers else loader, epochs=2, verbose=0).history

    expected = fitted(rows)
    cached = CachedDataset(rows, tmp_path)
    assert fitted(cached) == expected
    assert fitted(CachedDataset(None, tmp_path), 2) == expected
