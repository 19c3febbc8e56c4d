"""What is made of each kind of data, and the advice for what cannot be gone through in batches."""

import itertools
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from xlatrainer.data.adapters import as_batches, has_rows, is_endless, is_one_shot

X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(X, Y))


class Numbered:
    """As Keras's Sequence: two batches, no `__iter__`."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return X[2 * number : 2 * number + 2], Y[2 * number : 2 * number + 2]


def test_batches_are_passed_on_untouched() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)
    generator = (batch for batch in loader)
    for batches in ([(X, Y)], ((X, Y), (X, Y)), loader, generator, itertools.cycle([(X, Y)])):
        assert as_batches(batches, shuffle=True) is batches


def rows(batches: Any) -> list[Any]:
    """The targets of each batch."""
    return [(batch["labels"] if isinstance(batch, dict) else batch[1]).tolist() for batch in batches]


@pytest.mark.parametrize(
    "x",
    [X, X.numpy(), {"a": X, "b": X.numpy()}, (X, X.numpy()), [X, X]],
    ids=["tensor", "array", "dict", "tuple", "list"],
)
def test_rows_with_targets(x: Any) -> None:
    assert rows(as_batches(x, Y, batch_size=2)) == [[0, 1], [2, 3], [4]]
    assert rows(as_batches(x, Y.numpy())) == [[0, 1, 2, 3, 4]]
    torch.manual_seed(0)
    shuffled = rows(as_batches(x, Y, batch_size=5, shuffle=True))
    assert sorted(shuffled[0]) == [0, 1, 2, 3, 4] != shuffled[0]


def test_rows_without_targets() -> None:
    assert [batch.tolist() for batch in as_batches(X, batch_size=3)] == [X[:3].tolist(), X[3:].tolist()]
    for data in ({"ids": X, "labels": Y}, UserDict(ids=X, labels=Y)):
        assert rows(as_batches(data, batch_size=3)) == [[0, 1, 2], [3, 4]]


def test_weights_of_rows() -> None:
    (batch,) = as_batches(X, Y, np.arange(5))
    assert (len(batch), batch[2].dtype) == (3, torch.float32)
    (batch,) = as_batches({"ids": X}, None, Y.float())
    assert (batch.inputs["ids"].shape, batch.targets, batch.sample_weight.tolist()) == ((5, 2), None, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Stream()])
def test_datasets_of_examples(dataset: Dataset[Any]) -> None:
    assert rows(as_batches(dataset, batch_size=2)) == [[0, 1], [2, 3], [4]]
    assert len(rows(as_batches(dataset))) == 1
    torch.manual_seed(0)
    shuffled = rows(as_batches(dataset, batch_size=5, shuffle=True))[0]
    assert (shuffled == [0, 1, 2, 3, 4]) == isinstance(dataset, Stream)


def test_batches_by_number() -> None:
    assert rows(as_batches(Numbered())) == [[0, 1], [2, 3]]
    torch.manual_seed(1)
    orders = {str(rows(as_batches(Numbered(), shuffle=True))) for _ in range(20)}
    assert orders == {"[[0, 1], [2, 3]]", "[[2, 3], [0, 1]]"}


def test_tables() -> None:
    class Table:
        iloc = None

        def to_numpy(self) -> Any:
            return X.numpy()

    assert rows(as_batches(Table(), Y)) == [[0, 1, 2, 3, 4]]
    assert has_rows(Table())


def test_what_has_rows() -> None:
    assert all(map(has_rows, (X, X.numpy(), {"a": X}, TensorDataset(X), Stream())))
    assert not any(map(has_rows, ([X], DataLoader(TensorDataset(X)), iter([X]), Numbered())))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (None,),
            TypeError,
            "^x must be a DataLoader or another iterable of .* or tensors and arrays with y; got None",
        ),
        ((3,), TypeError, "got int"),
        (({"x": X, "n": 1},), TypeError, "got dict"),
        (("ab",), TypeError, "got str"),
        (
            ((X, Y),),
            TypeError,
            r"got a tuple of tensor of shape \(5, 2\), tensor of shape \(5,\). For inputs and targets",
        ),
        ((lambda: [],), TypeError, r"got the function <lambda>: pass what it returns"),
        (([1, 2], Y), TypeError, r"with y, x must be a tensor, an array, .* x is list. Batches and datasets hold"),
        ((TensorDataset(X), Y), TypeError, "x is TensorDataset"),
        ((X, "ab"), TypeError, "y is str"),
        (([(X, Y)], 3), TypeError, "y must be the targets of x, got 3; for a number of epochs write epochs=3"),
        ((X, Y, [1.0]), TypeError, "sample_weight"),
        ((X, Y[:3]), ValueError, "the same number of rows, got x: 5, y: 3"),
        (({"a": X, "b": X[:2]},), ValueError, "the same number of rows, got x: 5 and 2"),
        ((X[:0],), ValueError, r"at least one row; x has a tensor of shape \(0, 2\)"),
        ((torch.tensor(1.0),), ValueError, r"at least one row; x has a tensor of shape \(\)"),
        (([(X, Y)], None, Y), ValueError, "sample_weight is for tensors and arrays; let the batches of x"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_batches(*arguments, argument="x")


@pytest.mark.parametrize("data", [[(X, Y)], DataLoader(TensorDataset(X, Y)), iter([(X, Y)]), Numbered()])
def test_a_batch_size_is_for_what_is_batched_here(data: Any) -> None:
    with pytest.raises(ValueError, match="comes in batches already"):
        as_batches(data, batch_size=2)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_batch_sizes(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="batch_size must be"):
        as_batches(X, batch_size=size)


def test_one_shot() -> None:
    assert is_one_shot(iter([1]))
    assert is_one_shot(x for x in [1])
    assert not is_one_shot([1])


def test_endless() -> None:
    class Endless(Numbered):
        num_batches = None

    looped = DataLoader(TensorDataset(X, Y), sampler=itertools.count())  # type: ignore[arg-type]
    endless = (itertools.cycle([1]), itertools.count(), itertools.repeat(1), as_batches(Endless()), looped)
    assert all(map(is_endless, endless))
    finite: list[Any] = [
        itertools.repeat(1, 3),
        [1],
        iter([1]),
        as_batches(Numbered()),
        DataLoader(TensorDataset(X, Y)),
    ]
    assert not any(map(is_endless, finite))
