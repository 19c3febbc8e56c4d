"""Datasets of Hugging Face's `datasets`, recognized by what they can do: the library need not be installed."""

from collections.abc import Mapping
from typing import Any

from xlatrainer.data.batch import TARGET_KEYS, WEIGHT_KEY, Arguments

__all__ = ["examples_of", "is_hugging_face", "is_stream"]


def is_hugging_face(data: Any) -> bool:
    """Whether `data` is a dataset with columns, of the map or the iterable kind."""
    return all(hasattr(data, name) for name in ("with_format", "select_columns", "column_names"))


def is_stream(dataset: Any) -> bool:
    """Whether it can only be gone through from its beginning."""
    return not hasattr(type(dataset), "__len__")


def examples_of(dataset: Any, arguments: Arguments | None) -> Any:
    """`dataset` giving tensors, of the columns that the model takes.

    A column "label" is renamed to "labels" if the model takes that. Kept are the arguments that the model's `forward`
    names, labels, and sample weights; all columns if it names none of them but takes any.

    Args:
        dataset: Of one split. One whose format was set already keeps it.
        arguments: Those of the model; default None keeps all columns.

    Raises:
        TypeError: For a dict of splits.
        ValueError: If the model takes none of the columns.
    """
    if isinstance(dataset, Mapping):
        raise TypeError(f"got a dict of datasets; pass one of them, such as data[{next(iter(dataset), 'train')!r}]")
    columns = dataset.column_names
    if columns is not None and arguments is not None:
        if "label" in columns and "labels" not in columns and "labels" in arguments.names - {"label"}:
            dataset = dataset.rename_column("label", "labels")
            columns = dataset.column_names
        kept = [name for name in columns if name in arguments.names]
        if kept:
            extra = (*TARGET_KEYS, WEIGHT_KEY)
            kept = [name for name in columns if name in arguments.names or name in extra]
            dataset = dataset if len(kept) == len(columns) else dataset.select_columns(kept)
        elif not arguments.takes_any:
            raise ValueError(
                f"the model's forward takes none of the dataset's columns {list(columns)}, only "
                f"{sorted(arguments.names)}; rename the columns (dataset.rename_column), or pass a DataLoader whose "
                f"batches are (inputs, targets)"
            )
    chosen = getattr(dataset, "format", None)  # streams do not tell theirs
    return dataset if chosen is not None and chosen["type"] is not None else dataset.with_format("torch")
