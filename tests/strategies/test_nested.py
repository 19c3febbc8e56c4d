"""Tensors in nested batches."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch

from xlatrainer.strategies.nested import map_tensors, tensors_in

Pair = namedtuple("Pair", ["a", "b"])


def test_the_structure_is_kept() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    tree = {"pair": Pair(one, [two, "text"]), "none": None, "deep": ({"x": three},), 5: 1.5}
    mapped = map_tensors(len, tree)
    assert mapped == {"pair": Pair(1, [2, "text"]), "none": None, "deep": ({"x": 3},), 5: 1.5}
    assert isinstance(mapped["pair"], Pair)
    assert [len(tensor) for tensor in tensors_in(tree)] == [1, 2, 3]


def test_arrays_count_as_tensors() -> None:
    array = np.arange(3.0)
    assert torch.equal(map_tensors(lambda t: 2 * t, [array])[0], torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64))
    assert [tensor.tolist() for tensor in tensors_in(array)] == [[0.0, 1.0, 2.0]]


def test_dataclasses_are_copied() -> None:
    @dataclass(frozen=True)
    class Point:
        x: torch.Tensor
        name: str

    point = Point(torch.ones(2), "a")
    mapped = map_tensors(lambda t: 2 * t, [point])[0]
    assert (mapped.x.tolist(), mapped.name, point.x.tolist()) == ([2.0, 2.0], "a", [1.0, 1.0])
    assert [tensor is point.x for tensor in tensors_in({"p": point})] == [True]
