"""`CachedDataset`: a dataset whose samples are made once and kept in files.

Owns where the files are and when they are made; what is in one belongs to `sample_files`. A file appears whole or not
at all, so that any number of threads, workers and machines may fill a cache together.
"""

import json
import operator
import os
import warnings
from collections.abc import Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm.auto import tqdm

from xlatrainer.backend._private_api import shut_down_workers
from xlatrainer.data.position import is_deterministic
from xlatrainer.data.prefetch import checked_count
from xlatrainer.data.sample_files import DamagedSample, decode_sample, encode_sample
from xlatrainer.errors import CachedSampleError
from xlatrainer.storage.files import join, read, write
from xlatrainer.storage.publishing import TEMPORARY, is_abandoned
from xlatrainer.storage.systems import locate

__all__ = ["CachedDataset"]

_METADATA = "METADATA"
_VERSION = 1
_SAMPLES_PER_MESSAGE = 16  # that a worker of `warmup` makes before it reports


@dataclass(frozen=True)
class _Metadata:
    """What a cache says about itself, in the file METADATA."""

    version: int
    count: int
    compress: bool
    max_files_per_folder: int

    @classmethod
    def of(cls, content: bytes, file: str) -> "_Metadata":
        """Read it.

        Raises:
            CachedSampleError: If it is damaged.
            ValueError: If it is of another version.
        """
        kinds = {"version": int, "count": int, "compress": bool, "max_files_per_folder": int}
        try:
            found = json.loads(content)
            whole = isinstance(found, dict) and all(type(found.get(name)) is kind for name, kind in kinds.items())
        except ValueError:
            whole = False
        if not whole or found["count"] < 1 or found["max_files_per_folder"] < 2:
            raise CachedSampleError(
                f"{file} is damaged: it should be JSON with {', '.join(kinds)}. The samples beside it are of no use "
                f"without it; write it anew by hand if you know the numbers, or delete the folder"
            )
        if found["version"] != _VERSION:
            raise ValueError(f"{file} is of version {found['version']}; this program reads version {_VERSION}")
        return cls(**{name: found[name] for name in kinds})


class CachedDataset(Dataset[Any]):
    """A map-style dataset that makes each sample once, keeps it in a file, and reads it from there ever after.

    Args:
        data_set: The dataset whose samples are slow to make; its length and order must stay as they are. None: all
            samples are in the cache already, made on another machine perhaps.
        path: The folder, made if need be, or a URL that fsspec knows (`gs://BUCKET_NAME/PATH`). It need not be writable
            when all samples are in it.
        max_files_per_folder: No folder holds more files; at least 2, default 1000. Without `data_set` it is what the
            cache was made with.
        compress: Whether samples that come to six tenths of their size or less by it are compressed, with zlib; others
            (photographs, noise) are read faster as they are. Default True. Without `data_set` it is what the cache was
            made with.

    Raises:
        TypeError: If `data_set` has no length or no samples by number.
        ValueError: If the cache was made with another length, `max_files_per_folder` or `compress`, or by a version of
            this program that it does not read.
        FileNotFoundError: Without `data_set`, if there is no cache.
        CachedSampleError: If what the cache says about itself is damaged.

    A sample may hold tensors, NumPy arrays, numbers, strings, bytes and None, in lists, tuples, sets and dicts. For
    anything else (images of PIL, dataclasses, classes of one's own) the first access raises `TypeError`: turn it into
    tensors in the dataset. It comes back as it was, except that tensors are on the CPU without gradients and mappings
    are dicts; the first access gives the same as later ones. Nothing in the files is code.

    What a dataset draws at random is drawn once and kept: augment behind the cache, not in front of it.

    Files are checked whenever they are read. One that is damaged is made anew from `data_set`, with a warning; without
    `data_set` it is a `CachedSampleError` that names it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cached = CachedDataset(["a", "b"], folder)
        ...     cached.warmup(progress=False)
        ...     again = CachedDataset(None, folder)
        ...     len(again), again[1]
        (2, 'b')
    """

    def __init__(
        self,
        data_set: Any,
        path: str | os.PathLike[str],
        max_files_per_folder: int = 1000,
        compress: bool = True,
    ) -> None:
        self._data_set = data_set
        self._path = path
        if data_set is None:
            self._metadata = self._stored_metadata()
        else:
            if checked_count("max_files_per_folder", max_files_per_folder) < 2:
                raise ValueError(f"max_files_per_folder must be at least 2, got {max_files_per_folder}")
            mine = _Metadata(_VERSION, _length_of(data_set), bool(compress), max_files_per_folder)
            self._metadata = self._agreed_metadata(mine)

    def __len__(self) -> int:
        return self._metadata.count

    def __getitem__(self, index: int) -> Any:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"there are {len(self)} samples; there is none of index {number}")
        number %= len(self)
        file = self.file_of(number)
        try:
            content = read(file)
        except FileNotFoundError:
            if self._data_set is None:
                raise CachedSampleError(
                    f"Source dataset not provided and sample {number} is missing from cache folder {self._path}: there "
                    f"is no {file}"
                ) from None
            return self._made(number, file)
        try:
            return decode_sample(content, number)
        except DamagedSample as error:
            if self._data_set is None:
                raise CachedSampleError(
                    f"sample {number} cannot be read from {file}: {error}. Give the dataset to make it anew"
                ) from error
            warnings.warn(f"sample {number} is made anew, since {file} is damaged: {error}", stacklevel=2)
        return self._made(number, file)

    @property
    def is_deterministic(self) -> bool:
        """Whether a sample is known to depend on its index alone: whether the dataset behind the cache is."""
        return self._data_set is None or is_deterministic(self._data_set)

    def file_of(self, number: int) -> str:
        """The file of a sample: its number in base `max_files_per_folder`, one digit a folder, the last one its name.

        There are as many digits as the last sample's number has, at least two.
        """
        base = self._metadata.max_files_per_folder
        digits, largest = [number % base], (len(self) - 1) // base
        width = len(str(base - 1))
        while largest or len(digits) < 2:
            number, largest = number // base, largest // base
            digits.append(number % base)
        *folders, name = [f"{digit:0{width}}" for digit in reversed(digits)]
        return join(self._path, *folders, f"{name}.sample")

    def warmup(self, num_workers: int = 0, progress: bool = True) -> None:
        """Make all samples that are not in the cache, and check those that are.

        Args:
            num_workers: Processes that do it; default 0, this one alone. Several programs may do it at once.
            progress: Whether to show a progress bar. Default True.

        Raises:
            CachedSampleError: Without a dataset, for a sample that is missing or damaged.
        """
        loader = DataLoader(_Filling(self), _SAMPLES_PER_MESSAGE, num_workers=num_workers, collate_fn=len)
        with tqdm(total=len(self), unit=" samples", desc=f"cache {self._path}", disable=not progress) as bar:
            batches = iter(loader)
            try:
                for done in batches:
                    bar.update(done)
            finally:
                shut_down_workers(batches)
        _remove_half_written(self._path)

    def _made(self, number: int, file: str) -> Any:
        where = f"sample {number} of {type(self._data_set).__name__}"
        content = encode_sample(self._data_set[number], number, self._metadata.compress, where)
        try:
            # A loss of power may leave it damaged, and then it is made again: no reason to wait for the disk each time.
            write(file, content, flush=False)
        except OSError as error:
            error.add_note(
                f"sample {number} is not in the cache yet and could not be written to {file}: a cache that is not full "
                f"must be writable"
            )
            raise
        return decode_sample(content, number)

    def _stored_metadata(self) -> _Metadata:
        file = join(self._path, _METADATA)
        try:
            content = read(file)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no {file}, and so no cache to read from; give the dataset to make one"
            ) from None
        return _Metadata.of(content, file)

    def _agreed_metadata(self, mine: _Metadata) -> _Metadata:
        """`mine`, once the cache says the same."""
        try:
            stored = self._stored_metadata()
        except FileNotFoundError:
            write(join(self._path, _METADATA), json.dumps(asdict(mine), indent=1) + "\n")
            stored = self._stored_metadata()  # another program's, if it has just begun this cache as well
        if stored.count != mine.count:
            raise ValueError(
                f"the cache {self._path} is of a dataset with {stored.count} samples, this one has {mine.count}: give "
                f"each dataset a folder of its own, or delete this one"
            )
        for name in ("max_files_per_folder", "compress"):
            if getattr(stored, name) != getattr(mine, name):
                raise ValueError(
                    f"the cache {self._path} was made with {name}={getattr(stored, name)}: pass that, or another "
                    f"folder, instead of {name}={getattr(mine, name)}"
                )
        return stored


class _Filling(Dataset[int]):
    """The samples of a cache for their side effect: only their numbers go from a worker to its parent."""

    def __init__(self, cached: CachedDataset) -> None:
        self._cached = cached

    def __len__(self) -> int:
        return len(self._cached)

    def __getitem__(self, index: int) -> int:
        self._cached[index]
        return index


def _length_of(data_set: Any) -> int:
    if isinstance(data_set, IterableDataset) or not isinstance(data_set, Sized) or not hasattr(data_set, "__getitem__"):
        raise TypeError(
            f"a dataset with a length and with samples by number is needed, got {type(data_set).__name__}: the samples "
            f"of a stream have no numbers to be looked up by"
        )
    if not len(data_set):
        raise ValueError("the dataset has no samples")
    return len(data_set)


def _remove_half_written(path: str | os.PathLike[str]) -> None:
    """Delete what processes that were killed left in a local cache."""
    location = locate(path)
    if location.system is not None:
        return  # stores show an object only when all of it was sent
    for folder, _, names in os.walk(location.inner):
        for name in names:
            match = TEMPORARY.fullmatch(name)
            if match is not None and is_abandoned(match["host"], int(match["pid"]), name):
                Path(folder, name).unlink(missing_ok=True)
