"""The last rows set aside to validate on."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from xlatrainer.data.splitting import split_off

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


def targets(batches: Any) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


@pytest.mark.parametrize("data", [(X, Y), (TensorDataset(X, Y), None)], ids=["rows", "dataset"])
def test_the_last_rows_in_order(data: Any) -> None:
    training, validation = split_off(*data, None, 0.3, None, batch_size=4, shuffle=True)
    assert targets(validation) == [[7, 8, 9]]
    torch.manual_seed(0)
    first, second = targets(training), targets(training)
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(7))
    assert first != second
    assert targets(split_off(*data, None, 0.3, 2, batch_size=4)[1]) == [[7, 8], [9]]


def test_weights_go_with_their_rows() -> None:
    _, validation = split_off(X, Y, Y.float(), 0.2, None)
    assert [batch[2].tolist() for batch in validation] == [[8.0, 9.0]]


@pytest.mark.parametrize(
    ("data", "fraction", "error", "message"),
    [
        (DataLoader(TensorDataset(X, Y)), 0.2, TypeError, "the last part of a DataLoader is not known"),
        ([(X, Y)], 0.2, TypeError, "the last part of a list"),
        ((x for x in [(X, Y)]), 0.2, TypeError, "the last part of a generator"),
        (X, 1.0, ValueError, "above 0.0 and below 1.0, got 1.0"),
        (X, -0.1, ValueError, "above 0.0"),
        (X, 0.95, ValueError, "of 10 rows leaves none to train on"),
    ],
)
def test_refusals(data: Any, fraction: float, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split_off(data, None, None, fraction, None)
