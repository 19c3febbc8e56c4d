"""Every form of a batch, taken apart by types, names and shapes."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xlatrainer.data.batch import Arguments, Batch, as_tensor, plain_batch, split_batch

X, Y, W = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.ones(4)


@dataclass(frozen=True)
class Sample:
    inputs: Any
    targets: Any
    sample_weight: Any = None


@dataclass
class Words:
    ids: Tensor
    labels: Tensor


Named = namedtuple("Named", ["inputs", "targets"])
Pair = namedtuple("Pair", ["a", "b"])


class OnlyX(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Anything(nn.Module):
    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, (X, None, None)),
        ((X,), (X, None, None)),
        ((X, Y), (X, Y, None)),
        ([(X, X), Y, W], ((X, X), Y, W)),
        (Sample(X, Y, W), (X, Y, W)),
        (Named(X, Y), (X, Y, None)),
        (Pair(X, Y), (X, Y, None)),
        (Batch(X, Y, W), (X, Y, W)),
        ({"ids": X}, ({"ids": X}, None, None)),
        ({"ids": X, "labels": Y, "sample_weight": W}, ({"ids": X, "labels": Y}, Y, W)),
        (Words(X, Y), ({"ids": X, "labels": Y}, Y, None)),
    ],
)
def test_forms(batch: Any, expected: tuple[Any, Any, Any]) -> None:
    split = split_batch(batch)
    assert all(same(own, other) for own, other in zip(split, expected, strict=True))


def same(own: Any, other: Any) -> bool:
    if isinstance(own, dict):
        return list(own) == list(other) and all(own[key] is other[key] for key in own)
    return own is other or (isinstance(own, tuple) and own == other)


def test_a_user_dict_is_a_dict() -> None:
    split = split_batch(UserDict(ids=X, labels=Y))
    assert set(split.inputs) == {"ids", "labels"}
    assert split.targets is Y


def test_labels_that_the_model_does_not_take_are_targets_only() -> None:
    for key in ("labels", "label", "target", "targets"):
        split = split_batch({"x": X, key: Y, "sample_weight": W}, Arguments.of(OnlyX()))
        assert (list(split.inputs), split.targets, split.sample_weight) == (["x"], Y, W)
    batch = {"x": X, "labels": Y}
    assert split_batch(batch, Arguments.of(Anything())) == (batch, Y, None)
    assert split_batch({"x": X}, Arguments.of(OnlyX())) == ({"x": X}, None, None)


def test_plain_forms_are_passed_on() -> None:
    for batch in (3, (X,) * 5, X, (X, Y), [X, Y, W], {"x": X}, UserDict(x=X), Batch(X), Pair(X, Y)):
        assert plain_batch(batch) is batch


def test_arrays_of_float64_become_the_default_dtype() -> None:
    array = np.arange(3.0)
    assert as_tensor(array).dtype == torch.float32
    assert as_tensor(X) is X
    plain = plain_batch(({"a": [array]}, Pair(X, array), np.arange(3)))
    assert [plain[0]["a"][0].dtype, plain[1].b.dtype, type(plain[1])] == [torch.float32, torch.float32, Pair]
    assert isinstance(plain[2], np.ndarray)
    numbers = np.arange(3)
    assert as_tensor(numbers).data_ptr() == numbers.ctypes.data
    numbers.flags.writeable = False
    assert as_tensor(numbers).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ("ab", TypeError, "got a str"),
        ((X, X, Y, W), TypeError, r"got a tuple of 4 items \(several inputs go into a tuple"),
        ((), TypeError, "got a tuple of 0 items"),
        ((X, X, Y), TypeError, r"float or bool dtype, got int64 of shape \(4,\). If these are targets: several inputs"),
        ((X, X, np.zeros(4, int)), TypeError, "float or bool dtype, got int64"),
        ((X, Y, 1.0), TypeError, r"a tensor of shape \(rows,\), got float"),
        ((X, Y, torch.ones(3)), ValueError, r"shape \(4,\), or more .* got shape \(3,\) for targets of shape \(4,\)"),
        ((X, Y, torch.ones(4, 1)), ValueError, r"got shape \(4, 1\)"),
    ],
)
def test_what_is_no_batch(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split_batch(batch)


def test_weights_of_parts_of_a_row() -> None:
    weight = torch.ones(4, 5, dtype=torch.bool)
    assert split_batch((X, torch.zeros(4, 5), weight)).sample_weight is weight
