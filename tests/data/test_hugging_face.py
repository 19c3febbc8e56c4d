"""Datasets with the interface of Hugging Face's: the columns that a model takes, as tensors.

The classes here have of that interface what is used. `datasets` itself is used where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from xlatrainer.data.adapters import as_batches
from xlatrainer.data.batch import Arguments
from xlatrainer.data.hugging_face import is_hugging_face
from xlatrainer.data.splitting import split_off

Columns = dict[str, list[Any]]
COLUMNS: Columns = {
    "ids": [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]],
    "label": [0, 1, 1, 0, 1],
    "text": list("abcde"),
    "number": [0.5, 1.5, 2.5, 3.5, 4.5],
}


class Mapped:
    """Has a length and examples by number; in Python's types until a format is set."""

    def __init__(self, columns: Columns, kind: str | None = None) -> None:
        self.columns = columns
        self.format = {"type": kind}

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: values[index] for name, values in self.columns.items()}
        if self.format["type"] is None:
            return row
        return {name: value if isinstance(value, str) else torch.tensor(value) for name, value in row.items()}

    def with_format(self, kind: str) -> Mapped:
        return Mapped(self.columns, kind)

    def select_columns(self, names: Sequence[str]) -> Mapped:
        return Mapped({name: self.columns[name] for name in names}, self.format["type"])

    def rename_column(self, old: str, new: str) -> Mapped:
        return Mapped({new if name == old else name: v for name, v in self.columns.items()}, self.format["type"])

    def select(self, rows: Sequence[int]) -> Mapped:
        return Mapped({name: [values[row] for row in rows] for name, values in self.columns.items()})


class Streamed(IterableDataset[Any]):
    """Can only be gone through."""

    def __init__(self, mapped: Mapped) -> None:
        self.mapped = mapped
        self.column_names = mapped.column_names

    def __iter__(self) -> Iterator[Any]:
        return iter(self.mapped[index] for index in range(len(self.mapped)))

    def with_format(self, kind: str) -> Streamed:
        return Streamed(self.mapped.with_format(kind))

    def select_columns(self, names: Sequence[str]) -> Streamed:
        return Streamed(self.mapped.select_columns(names))

    def rename_column(self, old: str, new: str) -> Streamed:
        return Streamed(self.mapped.rename_column(old, new))


class TakesLabels(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None, **others: Any) -> Any:
        return ids


class TakesIds(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids


class TakesAnything(nn.Module):
    def forward(self, **arguments: Any) -> Any:
        return arguments


def real(columns: Columns) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def real_stream(columns: Columns) -> Any:
    return real(columns).to_iterable_dataset()


MAKERS: dict[str, Callable[[Columns], Any]] = {
    "mapped": Mapped,
    "streamed": lambda columns: Streamed(Mapped(columns)),
    "datasets": real,
    "datasets, streamed": real_stream,
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[Columns], Any]:
    return MAKERS[request.param]


def test_the_columns_of_the_model(make: Callable[[Columns], Any]) -> None:
    dataset = make(COLUMNS)
    assert is_hugging_face(dataset)
    batches = list(as_batches(dataset, batch_size=2, arguments=Arguments.of(TakesLabels())))
    assert [sorted(batch) for batch in batches] == [["ids", "labels"]] * 3
    assert batches[0]["ids"].tolist() == [[1, 2], [3, 4]]
    assert batches[2]["labels"].tolist() == [1]


def test_labels_stay_for_a_loss_of_our_own(make: Callable[[Columns], Any]) -> None:
    (batch,) = as_batches(make(COLUMNS), arguments=Arguments.of(TakesIds()))
    assert sorted(batch) == ["ids", "label"]


def test_all_columns_of_a_model_that_names_none(make: Callable[[Columns], Any]) -> None:
    (batch,) = as_batches(make(COLUMNS), arguments=Arguments.of(TakesAnything()))
    assert sorted(batch) == ["ids", "label", "number", "text"]
    assert batch["text"] == list("abcde")


def test_no_column_of_the_model(make: Callable[[Columns], Any]) -> None:
    with pytest.raises(ValueError, match=r"forward takes none of the dataset's columns \['text'\], only \['ids'\]"):
        as_batches(make({"text": ["a"]}), arguments=Arguments.of(TakesIds()))


@pytest.mark.parametrize("kind", ["mapped", "datasets"])
def test_the_last_rows_and_an_order_for_each_pass(kind: str) -> None:
    options = {"batch_size": 5, "shuffle": True, "arguments": Arguments.of(TakesLabels())}
    training, validation = split_off(MAKERS[kind](COLUMNS), None, None, 0.4, None, **options)
    assert [batch["ids"][:, 0].tolist() for batch in validation] == [[7, 9]]
    torch.manual_seed(0)
    orders = {tuple(batch["ids"][:, 0].tolist()) for _ in range(9) for batch in training}
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {(1, 3, 5)}


def test_a_stream_has_no_last_part() -> None:
    with pytest.raises(TypeError, match="the last part of a Streamed is not known"):
        split_off(Streamed(Mapped(COLUMNS)), None, None, 0.4, None)


def test_a_format_that_was_set_is_kept() -> None:
    dataset = Mapped(COLUMNS).with_format("numpy")
    loader = as_batches(dataset, arguments=Arguments.of(TakesIds()))
    assert loader.dataset.format == {"type": "numpy"}  # type: ignore[attr-defined]


def test_a_dict_of_splits() -> None:
    class Splits(dict[str, Any]):
        column_names = with_format = select_columns = None

    with pytest.raises(TypeError, match=r"got a dict of datasets; pass one of them, such as data\['test'\]"):
        as_batches(Splits(test=Mapped(COLUMNS)))
