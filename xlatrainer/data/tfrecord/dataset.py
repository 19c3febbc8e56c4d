"""Datasets of TFRecord files, for `torch.utils.data.DataLoader`: by index, or one after another."""

from __future__ import annotations

import glob
import itertools
import os
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from xlatrainer.data.replicas import replica
from xlatrainer.data.tfrecord.example import ExampleParser
from xlatrainer.data.tfrecord.features import Feature, decode, to_tensor
from xlatrainer.data.tfrecord.framing import COMPRESSIONS, Damage, Source, frames
from xlatrainer.data.tfrecord.index import INDEX_ENDING, index_of
from xlatrainer.data.tfrecord.reader import OnDamage, damage_of
from xlatrainer.errors import RecordError
from xlatrainer.storage import files
from xlatrainer.storage.systems import locate, tried

__all__ = ["TfRecordDataset", "TfRecordIterableDataset"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class _Decoder:
    """From the bytes of a record to a sample."""

    def __init__(self, features: Mapping[str, Feature] | None, transform: Callable[[Any], Any] | None) -> None:
        self._features = None if features is None else dict(features)
        self._transform = transform
        self._parser = ExampleParser(self._features)

    @property
    def is_deterministic(self) -> bool:
        """Whether no function of the user's takes part."""
        return self._transform is None and all(each.transform is None for each in (self._features or {}).values())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parser": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._parser = ExampleParser(self._features)

    def __call__(self, record: bytes) -> Any:
        values = self._parser.parse(record)
        if self._features is None:
            sample: Any = {name: to_tensor(value) for name, value in values.items()}
        else:
            sample = decode(values, self._features)
        return sample if self._transform is None else self._transform(sample)


class TfRecordDataset(Dataset[Any]):
    """The Examples of uncompressed TFRecord files by index: any sampler, any order, exact resumption.

    The first use finds where the records begin, from their lengths alone, and keeps it beside each file
    (`data.tfrecord.xlaindex`); later ones read that. Reading a sample checks both of its checksums.

    Args:
        paths: A path or URL, one with `*`, `?` or `[...]`, or a sequence of these. A pattern's files are sorted.
        features: By name what a feature is to become, see `Feature`; others are left out. Default None: all, as
            `TfRecordReader.read_example` gives them.
        transform: A function that makes the sample of the dict of features. Default None, the dict itself.
        index: "store" (default), or "memory" to write nothing beside the files.

    Raises:
        FileNotFoundError: If a file does not exist, or no file matches.
        RecordError: If a file is damaged or no TFRecord file. A compressed one cannot be read by index: see
            `TfRecordIterableDataset`.
    """

    def __init__(
        self,
        paths: Paths,
        features: Mapping[str, Feature] | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        index: Literal["store", "memory"] = "store",
    ) -> None:
        if index not in ("store", "memory"):
            raise ValueError(f"index={index!r}: accepted are 'store' and 'memory'")
        self.paths = _files(paths)
        self._decode = _Decoder(features, transform)
        self._offsets = [index_of(path, index == "store") for path in self.paths]
        self._ends = np.cumsum([len(each) - 1 for each in self._offsets]).tolist()

    @property
    def is_deterministic(self) -> bool:
        """Whether a sample is known to depend on its index alone, as it does without transforms."""
        return self._decode.is_deterministic

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        file = bisect_right(self._ends, index)
        number = index - (self._ends[file - 1] if file else 0)
        path, (start, stop) = self.paths[file], self._offsets[file][number : number + 2].tolist()
        content = files.read(path, start, stop)
        for record in frames(Source.of_bytes(content, path), damage_of("error"), number, start):
            return _located(self._decode, record, path, number)
        raise RecordError(
            f"{path}: record {number} at byte {start:,} is gone since the index was made", path, number, start
        )


class TfRecordIterableDataset(IterableDataset[Any]):
    """The Examples of TFRecord files one after another, each once in an epoch among all workers and replicas.

    With at least as many files as workers in all replicas, each of them reads files of its own; otherwise each reads
    all files and keeps every n-th record. The order is the same for the same seed, epoch and number of readers.

    Args:
        paths: A path or URL, one with `*`, `?` or `[...]`, or a sequence of these. A pattern's files are sorted.
        features: By name what a feature is to become, see `Feature`; others are left out. Default None: all, as
            `TfRecordReader.read_example` gives them.
        transform: A function that makes the sample of the dict of features. Default None, the dict itself.
        compression: "" (default), "ZLIB" or "GZIP".
        shuffle_files: Whether each epoch has its own order of files. Default False.
        shuffle_buffer: Records that are kept, undecoded, to give a random one of them; default 0, which gives them in
            their order.
        interleave: Files that are read in turns, a record from each. Default 1.
        seed: Of both kinds of shuffling, with the epoch (`set_epoch`). Default 0.
        rank, world_size: This replica's number and how many there are. Default None: those of `torch.distributed` if it
            is initialized when this is made, else the launcher's (RANK, WORLD_SIZE), else the only one.
        on_damage: "error" (default), or "skip", see `TfRecordReader`; `num_damaged` counts in the process that reads.
        buffer_size: Bytes of each file that are read or decompressed at once; default 1 MiB.

    Raises:
        FileNotFoundError: If no file matches.
        RecordError: When reading damage, or a record that is no Example of these features.
        ValueError: For numbers out of range or another compression.
    """

    def __init__(
        self,
        paths: Paths,
        features: Mapping[str, Feature] | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        compression: str = "",
        shuffle_files: bool = False,
        shuffle_buffer: int = 0,
        interleave: int = 1,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        on_damage: OnDamage = "error",
        buffer_size: int = 1 << 20,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise ValueError(f"the compression {compression!r} is none of {', '.join(map(repr, COMPRESSIONS))}")
        if shuffle_buffer < 0 or interleave < 1:
            raise ValueError(
                f"shuffle_buffer must be at least 0, interleave at least 1: {shuffle_buffer}, {interleave}"
            )
        if (rank is None) != (world_size is None):
            raise ValueError("rank and world_size go together")
        if rank is None or world_size is None:
            rank, world_size = replica()
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1}, got {rank}")
        self.paths = _files(paths)
        self._decode = _Decoder(features, transform)
        self._compression, self._buffer_size = compression, buffer_size
        self._shuffle_files, self._shuffle_buffer, self._interleave = shuffle_files, shuffle_buffer, interleave
        self._seed, self._epoch = seed, 0
        self._rank, self._world_size = rank, world_size
        self._damage = damage_of(on_damage)
        self._given = self._skipped = 0

    @property
    def num_damaged(self) -> int:
        """How often something damaged was left out so far, in this process: a record, or the rest of a file."""
        return self._damage.records

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; without it, each has the one of epoch 0."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The place in the epoch, for torchdata's `StatefulDataLoader`: the epoch and the samples given in it."""
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass go on at a place: the records before it are read, but not decoded."""
        self._epoch, self._skipped = state["epoch"], state["given"]

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        num_workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
        reader, readers = self._rank * num_workers + worker_id, self._world_size * num_workers
        paths = list(self.paths)
        if self._shuffle_files:
            random.Random(f"{self._seed} {self._epoch}").shuffle(paths)  # the same for all readers
        own = paths[reader::readers] if len(paths) >= readers else paths
        records = self._records(own)
        if len(paths) < readers:
            records = (each for turn, each in enumerate(records) if turn % readers == reader)
        if self._shuffle_buffer:
            records = _shuffled(records, self._shuffle_buffer, random.Random(f"{self._seed} {self._epoch} {reader}"))
        self._given, self._skipped = self._skipped, 0
        return self._samples(itertools.islice(records, self._given, None))

    def _samples(self, records: Iterator[tuple[str, int, bytes]]) -> Iterator[Any]:
        for path, number, record in records:
            sample = _located(self._decode, record, path, number)
            self._given += 1
            yield sample

    def _records(self, paths: Sequence[str]) -> Iterator[tuple[str, int, bytes]]:
        """The records of these files, of `interleave` of them in turns: path, number and data."""
        waiting = iter(paths)
        opened: list[_OpenFile] = []
        try:
            while True:
                while len(opened) < self._interleave and (path := next(waiting, None)) is not None:
                    source = Source(path, self._compression, self._buffer_size)
                    opened.append(_OpenFile(source, Damage(self._damage.skip)))
                if not opened:
                    return
                for file in tuple(opened):
                    before = file.damage.records
                    found = file.next()
                    self._damage.records += file.damage.records - before
                    if found is None:
                        file.source.close()
                        opened.remove(file)
                    else:
                        yield file.source.path, *found
        finally:
            for file in opened:
                file.source.close()


class _OpenFile:
    def __init__(self, source: Source, damage: Damage) -> None:
        self.source, self.damage = source, damage
        self._frames = frames(source, damage)
        self._given = 0

    def next(self) -> tuple[int, bytes] | None:
        """The number of the next record in the file and its data; None at the end."""
        for data in self._frames:
            self._given += 1
            return self._given - 1 + self.damage.records, data
        return None


def _shuffled(records: Iterator[Any], size: int, generator: random.Random) -> Iterator[Any]:
    """A random one of `size` records that are kept, in whose place the next one comes."""
    kept: list[Any] = []
    for record in records:
        if len(kept) < size:
            kept.append(record)
            continue
        place = generator.randrange(size)
        given, kept[place] = kept[place], record
        yield given
    generator.shuffle(kept)
    yield from kept


def _located(decoder: Callable[[bytes], Any], record: bytes, path: str, number: int) -> Any:
    """The sample; an error in making it names the record."""
    try:
        return decoder(record)
    except (RecordError, KeyError, TypeError, ValueError) as error:
        what = error.args[0] if error.args else error
        raise RecordError(f"{path}: record {number}: {what}", path, number) from error


def _files(paths: Paths) -> list[str]:
    """The files, with patterns replaced by what matches them."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = [match for path in given for match in _matches(os.fspath(path))]
    if not found:
        raise FileNotFoundError("there are no TFRecord files: paths is empty")
    return found


def _matches(path: str) -> list[str]:
    if not any(character in path for character in "*?[") or files.exists(path):
        return [path]
    location = locate(path)
    if location.system is None:
        matches = sorted(glob.glob(location.inner))
    else:
        scheme = path.partition("://")[0]
        names = tried(location, lambda: location.system.glob(location.inner))
        matches = sorted(f"{scheme}://{name.lstrip('/')}" for name in names)
    matches = [each for each in matches if not each.endswith(INDEX_ENDING)]
    if not matches:
        raise FileNotFoundError(f"no file matches {path}")
    return matches
