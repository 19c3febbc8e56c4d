"""Rows of nested tensors in batches."""

import numpy as np
import torch

from xlatrainer.data.rows import RowBatches, is_rows

X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)


def test_each_pass_has_an_order_of_its_own_and_all_rows_stay_together() -> None:
    batches = RowBatches(({"x": X, "deep": [X.numpy()]}, Y, None), 2, shuffle=True)
    assert len(batches) == 3
    torch.manual_seed(0)
    orders = []
    for _ in range(3):
        seen = []
        for inputs, targets, nothing in batches:
            assert nothing is None
            assert torch.equal(inputs["x"], X[targets])
            assert torch.equal(inputs["deep"][0], X[targets])
            seen += targets.tolist()
        assert sorted(seen) == [0, 1, 2, 3, 4]
        orders.append(tuple(seen))
    assert len(set(orders)) == 3
    torch.manual_seed(0)
    assert tuple(y for _, targets, _ in batches for y in targets.tolist()) == orders[0]


def test_batches_in_order_share_memory() -> None:
    first = next(iter(RowBatches(X, 2)))
    assert first.data_ptr() == X.data_ptr()


def test_arrays_of_float64_become_the_default_dtype() -> None:
    assert next(iter(RowBatches(np.zeros((2, 2)), 2))).dtype == torch.float32
    assert next(iter(RowBatches(torch.zeros(2, dtype=torch.float64), 2))).dtype == torch.float64


def test_split() -> None:
    first, second = RowBatches((X, Y), 2, shuffle=True).split(3, batch_size=5)
    assert (len(first), len(second), first.shuffle, second.shuffle) == (2, 1, True, False)
    assert next(iter(second))[1].tolist() == [3, 4]
    assert sorted(y for _, targets in first for y in targets.tolist()) == [0, 1, 2]


def test_what_rows_can_be_taken_of() -> None:
    assert all(map(is_rows, (X, X.numpy(), {"a": X}, (X, {"b": [X]}))))
    assert not any(map(is_rows, ({}, (), [], 3, "a", {"a": X, "b": 1}, (X, None))))
