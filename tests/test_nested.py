"""Tensors in nested batches."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from xlatrainer.nested import DataWrapper, map_tensors, tensors_in

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


class Boxes(DataWrapper):
    def __init__(self, corners: torch.Tensor, scores: list[torch.Tensor], name: str) -> None:
        self.corners, self.scores, self.name = corners, scores, name

    def get_tensors(self) -> list[object]:
        return [self.corners, self.scores]

    def from_tensors(self, tensors: list[object]) -> "Boxes":
        return Boxes(*tensors, self.name)  # type: ignore[arg-type]


def test_classes_of_the_users_own() -> None:
    boxes = Boxes(torch.ones(2), [torch.zeros(1)], "first")
    mapped = map_tensors(lambda t: t + 1, {"boxes": boxes})["boxes"]
    assert (mapped.corners.tolist(), mapped.scores[0].tolist(), mapped.name) == ([2.0, 2.0], [1.0], "first")
    assert [tensor.tolist() for tensor in tensors_in([boxes])] == [[1.0, 1.0], [0.0]]


def test_a_wrapper_without_its_methods() -> None:
    with pytest.raises(NotImplementedError, match="The method is missing an implementation"):
        map_tensors(len, DataWrapper())
    with pytest.raises(NotImplementedError, match="The method is missing an implementation"):
        DataWrapper().from_tensors([])


def test_batch_sizes_of_packed_sequences_are_left_alone() -> None:
    packed = pack_sequence([torch.ones(1), torch.full((3,), 2.0)], enforce_sorted=False)
    mapped = map_tensors(lambda t: t + 1, packed)
    assert mapped.data.tolist() == [3.0, 2.0, 3.0, 3.0]
    assert mapped.batch_sizes is packed.batch_sizes
    assert len(list(tensors_in(packed))) == 3
