"""TFRecord files as datasets: each record once, in an order that is known, in workers and replicas too."""

import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from xlatrainer.data.position import ResumableBatches
from xlatrainer.data.tfrecord import Feature, TfRecordDataset, TfRecordIterableDataset, TfRecordWriter
from xlatrainer.data.tfrecord import dataset as dataset_module
from xlatrainer.data.tfrecord import index as index_module
from xlatrainer.errors import RecordError

SIZES = (4, 0, 7, 1)
NUMBER = Feature(torch.int64)


def fill(folder: Any, compression: str = "") -> list[str]:
    """Files with the numbers from 0 on, over all files."""
    number, paths = 0, []
    for file, size in enumerate(SIZES):
        paths.append(f"{folder}/part-{file}.tfrecord")
        with TfRecordWriter(paths[-1], compression) as writer:
            for _ in range(size):
                writer.write({"number": number, "text": f"number {number}"})
                number += 1
    return paths


def numbers(dataset: Any) -> list[int]:
    return [int(sample["number"]) for sample in dataset]


def test_by_index(tmp_path: Path) -> None:
    paths = fill(tmp_path)
    for _ in range(2):  # the second time with stored indices
        dataset = TfRecordDataset(f"{tmp_path}/part-*", {"number": NUMBER, "text": Feature(str)})
        assert dataset.paths == paths
        assert len(dataset) == 12
        assert [dataset[i] for i in range(12)] == [
            {"number": torch.tensor(i), "text": f"number {i}"} for i in range(12)
        ]
        assert dataset[-1]["text"] == "number 11"
        for wrong in (12, -13):
            with pytest.raises(IndexError):
                dataset[wrong]
    loader = DataLoader(dataset, batch_size=5, num_workers=2)
    assert [batch["number"].tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert pickle.loads(pickle.dumps(dataset))[3]["text"] == "number 3"


def test_a_position_is_gone_on_from_without_reading_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = TfRecordDataset(fill(tmp_path), {"number": NUMBER})
    loader = DataLoader(dataset, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0))
    first = ResumableBatches(loader)
    drawn = iter(first)
    next(drawn)
    next(drawn)
    state = first.state_dict()
    rest = [batch["number"].tolist() for batch in drawn]
    second = ResumableBatches(loader)
    second.load_state_dict(state)
    read = []
    real = dataset_module.files.read
    monkeypatch.setattr(dataset_module.files, "read", lambda *arguments: read.append(arguments) or real(*arguments))
    assert [batch["number"].tolist() for batch in second] == rest
    assert len(read) == 6
    assert not TfRecordDataset(dataset.paths, transform=dict).is_deterministic
    assert not TfRecordDataset(dataset.paths, {"number": Feature(torch.int64, transform=int)}).is_deterministic


def test_the_index_is_stored_and_follows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fill(tmp_path)[0]
    scans = []
    real = index_module.offsets
    monkeypatch.setattr(index_module, "offsets", lambda source: scans.append(source.path) or real(source))
    for _ in range(2):
        assert len(TfRecordDataset(path)) == 4
    assert len(scans) == 1
    with TfRecordWriter(path) as writer:
        writer.write({"number": 1})
    assert len(TfRecordDataset(path)) == 1
    index = Path(path + ".xlaindex")
    content = index.read_bytes()
    for damaged in (content[:-1], b"", content[:5] + bytes([content[5] ^ 1]) + content[6:]):
        index.write_bytes(damaged)
        assert len(TfRecordDataset(path)) == 1
    assert len(scans) == 5
    index.unlink()
    assert len(TfRecordDataset(path, index="memory")) == 1
    assert not index.exists()


def test_an_index_that_cannot_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fill(tmp_path)[0]

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(index_module.files, "write", refuse)
    with pytest.warns(UserWarning, match="cannot be stored beside it"):
        assert len(TfRecordDataset(path)) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(TfRecordDataset(path, index="memory")) == 4


def test_damage_by_index_is_located(tmp_path: Path) -> None:
    path = Path(fill(tmp_path)[0])
    dataset = TfRecordDataset(path)
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)
    assert int(dataset[0]["number"]) == 0
    with pytest.raises(RecordError, match=f"{path.name}: record 3 at byte .* data do not have the checksum"):
        dataset[3]
    path.write_bytes(content[:20])
    with pytest.raises(RecordError, match=r"record 3 .* is gone"):
        dataset[3]
    with pytest.raises(RecordError, match="the file holds"):
        TfRecordDataset(path)
    with pytest.raises(FileNotFoundError):
        TfRecordDataset(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        TfRecordDataset(f"{tmp_path}/*.none")


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_record_once_among_workers(tmp_path: Path, workers: int, compression: str) -> None:
    paths = fill(tmp_path, compression)
    for files, expected in ((paths, range(12)), (paths[2:3], range(4, 11))):  # by files, by records
        dataset = TfRecordIterableDataset(files, {"number": NUMBER}, compression=compression)
        found = numbers(DataLoader(dataset, batch_size=None, num_workers=workers))
        assert sorted(found) == list(expected)
        if not workers:
            assert found == list(expected)


@pytest.mark.parametrize("world_size", [2, 3, 6])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_record_once_among_replicas(tmp_path: Path, world_size: int, shuffle: bool) -> None:
    paths = fill(tmp_path)
    found = []
    for rank in range(world_size):
        dataset = TfRecordIterableDataset(
            paths,
            {"number": NUMBER},
            rank=rank,
            world_size=world_size,
            shuffle_files=shuffle,
            shuffle_buffer=3 * shuffle,
        )
        dataset.set_epoch(4)
        found += numbers(dataset)
    assert sorted(found) == list(range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on(tmp_path: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    decoded = []

    def loader() -> Any:
        dataset = TfRecordIterableDataset(
            fill(tmp_path), {"number": NUMBER}, transform=decoded.append if workers == 0 else None, shuffle_buffer=4
        )
        dataset.set_epoch(1)
        return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    first = loader()
    samples = iter(first)
    before = [next(samples) for _ in range(5)]
    state = first.state_dict()
    rest = list(samples)
    assert len(before) + len(rest) == 12
    decoded_before = list(decoded)
    decoded.clear()
    second = loader()
    second.load_state_dict(state)
    assert list(second) == rest
    assert decoded == decoded_before[5:]
    assert len(list(second)) == 12
    third = loader()
    third.load_state_dict(first.state_dict())  # of a pass that is over
    assert len(list(third)) == 12


def test_files_in_turns(tmp_path: Path) -> None:
    dataset = TfRecordIterableDataset(fill(tmp_path), {"number": NUMBER}, interleave=3)
    assert numbers(dataset) == [0, 4, 1, 5, 11, 2, 6, 3, 7, 8, 9, 10]


def test_shuffling_follows_seed_and_epoch(tmp_path: Path) -> None:
    def order(seed: int, epoch: int, **options: Any) -> list[int]:
        dataset = TfRecordIterableDataset(fill(tmp_path), {"number": NUMBER}, seed=seed, **options)
        dataset.set_epoch(epoch)
        return numbers(dataset)

    for options in ({"shuffle_buffer": 5}, {"shuffle_buffer": 100}, {"shuffle_files": True}):
        first = order(0, 0, **options)
        assert sorted(first) == list(range(12))
        assert order(0, 0, **options) == first
        assert {tuple(order(seed, epoch, **options)) for seed in range(3) for epoch in range(3)} - {tuple(first)}


def test_a_break_closes_the_files(tmp_path: Path) -> None:
    paths = fill(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    samples: Iterator[Any] = iter(TfRecordIterableDataset(paths, interleave=4))
    next(samples)
    assert len(os.listdir("/proc/self/fd")) > before
    del samples
    assert len(os.listdir("/proc/self/fd")) == before


def test_skipping_and_counting(tmp_path: Path) -> None:
    paths = fill(tmp_path)
    content = bytearray(Path(paths[2]).read_bytes())
    content[20] ^= 1
    Path(paths[2]).write_bytes(content)
    with pytest.raises(RecordError, match="part-2.tfrecord: record 0"):
        numbers(TfRecordIterableDataset(paths))
    dataset = TfRecordIterableDataset(paths, on_damage="skip")
    assert numbers(dataset) == [n for n in range(12) if n != 4]
    assert dataset.num_damaged == 1


def test_errors_of_records_are_located(tmp_path: Path) -> None:
    paths = fill(tmp_path)
    with pytest.raises(RecordError, match=r"part-0.tfrecord: record 0: the Example has no feature 'missing'") as caught:
        next(iter(TfRecordIterableDataset(paths, {"missing": Feature()})))
    error = caught.value
    assert pickle.loads(pickle.dumps(error)).record == 0
    assert str(type(error)(str(error))) == str(error)  # how DataLoader brings it out of a worker
    with pytest.raises(RecordError, match="record 2"):
        TfRecordDataset(paths, {"number": Feature(str)})[2]


def test_arguments() -> None:
    for options in (
        {"rank": 1},
        {"rank": 2, "world_size": 2},
        {"interleave": 0},
        {"shuffle_buffer": -1},
        {"compression": "x"},
    ):
        with pytest.raises(ValueError, match="rank|interleave|compression"):
            TfRecordIterableDataset("file", **options)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        TfRecordDataset([])


def test_urls(bucket: str) -> None:
    fill(bucket)
    dataset = TfRecordDataset(f"{bucket}/part-*.tfrecord", {"number": NUMBER})
    assert numbers(dataset[i] for i in range(12)) == list(range(12))
    assert len(TfRecordDataset(f"{bucket}/part-*", {"number": NUMBER})) == 12
    loader = DataLoader(TfRecordIterableDataset(f"{bucket}/part-*", {"number": NUMBER}), batch_size=None, num_workers=2)
    assert sorted(numbers(loader)) == list(range(12))
