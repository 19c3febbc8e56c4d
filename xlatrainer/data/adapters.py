"""Turns what a user passes as data into something that yields batches, or says why it cannot.

Knows nothing of models or steps. Batches that come as such are passed on untouched.
"""

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from xlatrainer.data.batch import Arguments, Batch
from xlatrainer.data.device_loader import MpDeviceLoader, ParallelLoader
from xlatrainer.data.hugging_face import examples_of, is_hugging_face, is_stream
from xlatrainer.data.prefetch import Prefetched
from xlatrainer.data.rows import RowBatches, is_rows
from xlatrainer.data.sequences import SequenceBatches, is_sequence

__all__ = ["DEFAULT_BATCH_SIZE", "as_batches", "has_rows", "is_endless", "is_one_shot", "kind_of", "length_of"]

DEFAULT_BATCH_SIZE = 32


def as_batches(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    argument: str = "data",
    arguments: Arguments | None = None,
) -> Iterable[Any]:
    """Batches of what a user passes as data.

    Args:
        x: A DataLoader, a list or another iterable of batches, or an object that hands out batches by number
            (`SequenceBatches`): they come as they are. Those of an `MpDeviceLoader` are loaded ahead by its threads,
            and left on the host. A dataset of examples, torch's or Hugging Face's, and tensors and arrays (with `y`, or
            a dict of them) come in batches of `batch_size`.
        y: Targets for tensors and arrays `x`: tensors or arrays of as many rows; default None.
        sample_weight: For each row of `x`, shape (rows,), float; default None, all count alike.
        batch_size: Rows in a batch; for data that does not come in batches. Default None, which means 32.
        shuffle: Whether each pass has an order of its own; for tensors and arrays, datasets that can be indexed, and
            batches by number. All else keeps its own. Default False.
        argument: What the caller calls `x`, for the messages; default "data".
        arguments: Those of the model, by which a Hugging Face dataset's columns are chosen; default None, all columns.

    Raises:
        TypeError: For what cannot be gone through in batches.
        ValueError: If `batch_size`, `y` or `sample_weight` is given with data that has its own.
    """
    if isinstance(x, MpDeviceLoader | ParallelLoader):
        x = x.batches_for_trainer
    if _is_table(x):
        x = x.to_numpy()
    if y is not None or _is_array(x) or (isinstance(x, Mapping) and is_rows(x)):
        return _rows(x, y, sample_weight, DEFAULT_BATCH_SIZE if batch_size is None else batch_size, shuffle, argument)
    if sample_weight is not None:
        raise ValueError(
            f"sample_weight is for tensors and arrays; let the batches of {argument} ({type(x).__name__}) have it as "
            f"their third item, (inputs, targets, sample_weight), or under the key 'sample_weight'"
        )
    if is_hugging_face(x):
        examples = examples_of(x, arguments)
        return _loader(examples, batch_size, shuffle and not is_stream(examples))
    if isinstance(x, Dataset):
        return _loader(x, batch_size, shuffle and not isinstance(x, IterableDataset))
    if batch_size is not None:
        raise ValueError(
            f"batch_size is for tensors, arrays and datasets; {argument} ({type(x).__name__}) comes in batches already"
        )
    if is_sequence(x):
        return SequenceBatches(x, shuffle)
    return _as_they_are(x, argument)


def has_rows(x: Any) -> bool:
    """Whether `x` is data in rows or examples, which are batched here, rather than in batches."""
    return (
        _is_table(x)
        or _is_array(x)
        or (isinstance(x, Mapping) and is_rows(x))
        or isinstance(x, Dataset)
        or (is_hugging_face(x))
    )


def is_one_shot(batches: Iterable[Any]) -> bool:
    """Whether `batches` is an iterator (a generator, say): it can be gone through once, and never restarts."""
    return isinstance(_source(batches), Iterator)


def is_endless(batches: Iterable[Any]) -> bool:
    """Whether `batches` is known to have no end. False only says that it is not known."""
    batches = _source(batches)
    if isinstance(batches, SequenceBatches):
        return batches.num_batches is None
    if isinstance(batches, DataLoader):
        return any(is_endless(part) for part in (batches.sampler, batches.batch_sampler) if part is not None)
    if isinstance(batches, itertools.repeat):
        return operator.length_hint(batches, -1) == -1
    return isinstance(batches, itertools.cycle | itertools.count)


def length_of(batches: Iterable[Any]) -> int | None:
    """How many batches a pass has, or None where that is not known."""
    batches = _source(batches)
    # The length of a loader over an IterableDataset is a guess: it knows neither the workers' shares nor the dataset.
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
        return None
    if isinstance(batches, DataLoader):
        samplers = (batches.sampler, batches.batch_sampler)
        return len(batches) if all(isinstance(each, Sized) for each in samplers if each is not None) else None
    if isinstance(batches, SequenceBatches):
        return batches.num_batches
    if isinstance(batches, Sized):
        return len(batches)
    return None


def kind_of(batches: Any) -> str:
    """What `batches` is, for messages: the loader's type behind those who draw from it ahead."""
    return type(_source(batches)).__name__


def _source(batches: Iterable[Any]) -> Iterable[Any]:
    """The loader behind those threads that draw from it ahead; all else as it is."""
    return batches.source if isinstance(batches, Prefetched) else batches


def _rows(x: Any, y: Any, sample_weight: Any, batch_size: int, shuffle: bool, argument: str) -> RowBatches:
    """Tensors and arrays in batches."""
    if isinstance(y, int):
        raise TypeError(f"y must be the targets of {argument}, got {y}; for a number of epochs write epochs={y}")
    parts = {argument: x, "y": y, "sample_weight": sample_weight}
    for name, part in parts.items():
        if _is_table(part):
            parts[name] = part.to_numpy()
        elif part is not None and not is_rows(part):
            raise TypeError(
                f"with y, {argument} must be a tensor, an array, or a dict, tuple or list of them, and so must y and "
                f"sample_weight; {name} is {_describe(part)}. Batches and datasets hold their targets themselves"
            )
    weight = parts["sample_weight"]
    if weight is not None and not isinstance(weight, Tensor | np.ndarray):
        raise TypeError(f"sample_weight must be a tensor or array of shape (rows,), got {_describe(weight)}")
    if weight is not None and "int" in str(weight.dtype):
        parts["sample_weight"] = weight.astype(np.float32) if isinstance(weight, np.ndarray) else weight.float()
    given = {name: part for name, part in parts.items() if part is not None}
    if list(given) == [argument]:
        return RowBatches(parts[argument], batch_size, shuffle, (argument,))
    columns = Batch(*parts.values()) if parts["y"] is None else tuple(given.values())
    return RowBatches(columns, batch_size, shuffle, tuple(parts if parts["y"] is None else given))


def _loader(examples: Any, batch_size: int | None, shuffle: bool) -> DataLoader[Any]:
    size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
    return DataLoader(examples, batch_size=size, shuffle=shuffle or None)


def _as_they_are(x: Any, argument: str) -> Iterable[Any]:
    accepted = (
        f"{argument} must be a DataLoader or another iterable of (inputs, targets) batches, a dataset, or tensors and "
        f"arrays with y"
    )
    if isinstance(x, tuple) and any(map(_is_array, x)):
        raise TypeError(
            f"{accepted}; got a tuple of {', '.join(map(_describe, x))}. For inputs and targets pass them one by one, "
            f"(x, y); for batches, a list of them"
        )
    if callable(x) and not isinstance(x, Iterable):
        raise TypeError(f"{accepted}; got the {type(x).__name__} {getattr(x, '__name__', '')}: pass what it returns")
    if isinstance(x, Mapping | str | bytes) or not isinstance(x, Iterable):
        raise TypeError(f"{accepted}; got {type(x).__name__}")
    return x


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_table(value: Any) -> bool:
    """Whether it is a pandas, or like, table or column of numbers."""
    return hasattr(value, "to_numpy") and hasattr(value, "iloc")


def _describe(item: Any) -> str:
    if isinstance(item, Tensor | np.ndarray):
        return f"{'tensor' if isinstance(item, Tensor) else 'array'} of shape {tuple(item.shape)}"
    return type(item).__name__
