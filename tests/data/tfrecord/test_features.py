"""What features become, by a `Feature` and by themselves."""

from typing import Any

import pytest
import torch

from xlatrainer.data.tfrecord import Feature, encode_example, encode_sequence_example, parse_example
from xlatrainer.data.tfrecord.example import parse_sequence_example
from xlatrainer.data.tfrecord.features import decode

VALUES = parse_example(
    encode_example(
        {
            "image": torch.arange(6, dtype=torch.uint8),
            "floats": torch.tensor([[0.5, 1.5], [2.5, 3.5]], dtype=torch.float64),
            "label": 7,
            "flags": [True, False],
            "text": "grün",
            "words": ["a", "b"],
            "empty": [],
        }
    )
)


@pytest.mark.parametrize(
    ("name", "feature", "expected"),
    [
        ("image", Feature(torch.uint8, (1, 2, 3)), torch.arange(6, dtype=torch.uint8).reshape(1, 2, 3)),
        ("image", Feature(torch.float32, None, transform=None), TypeError),
        ("image", Feature(torch.uint8, (2, 2)), ValueError),
        ("image", Feature(torch.uint8, None, transform=len), 6),
        ("floats", Feature(shape=(2, 2)), torch.tensor([[0.5, 1.5], [2.5, 3.5]])),
        ("floats", Feature(torch.bfloat16, None), torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.bfloat16)),
        ("floats", Feature(torch.int64, None), TypeError),
        ("floats", Feature(), ValueError),
        ("floats", Feature(str), TypeError),
        ("label", Feature(torch.int64), torch.tensor(7)),
        ("label", Feature(torch.float32, (1,)), torch.tensor([7.0])),
        ("flags", Feature(torch.bool, (2,)), torch.tensor([True, False])),
        ("text", Feature(str), "grün"),
        ("text", Feature(bytes), "grün".encode()),
        ("text", Feature(str, default="none"), "grün"),
        ("words", Feature(str, None), ["a", "b"]),
        ("words", Feature(str), ValueError),
        ("words", Feature(torch.uint8, None), ValueError),
        ("empty", Feature(torch.int64, None), torch.empty(0, dtype=torch.int64)),
        ("empty", Feature(torch.float32, (2,), default=-1), torch.tensor([-1.0, -1.0])),
        ("missing", Feature(torch.int64, default=5), torch.tensor(5)),
        ("missing", Feature(torch.int64, None, default=5), torch.empty(0, dtype=torch.int64)),
        ("missing", Feature(str, default="none"), "none"),
        ("missing", Feature(), KeyError),
    ],
)
def test_decode(name: str, feature: Feature, expected: Any) -> None:
    if isinstance(expected, type):
        with pytest.raises(expected, match=f"'{name}'"):
            decode(VALUES, {name: feature})
        return
    found = decode(VALUES, {name: feature})[name]
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_a_feature_is_checked() -> None:
    with pytest.raises(ValueError, match="dtype 'int' is none of"):
        Feature("int")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shape"):
        Feature(str, (2,))


@pytest.mark.parametrize(
    ("value", "error"),
    [(object(), TypeError), ([1, "a"], TypeError), (1 << 63, ValueError), (torch.zeros(1) + 1j, TypeError)],
)
def test_what_no_example_holds(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="'name'"):
        encode_example({"name": value})


def test_sequences_round() -> None:
    context, lists = parse_sequence_example(
        encode_sequence_example({"length": 2}, {"words": ["a", "b"], "scores": [[1.0], [2.0, 3.0]]})
    )
    assert context["length"][0] == 2
    assert lists["words"] == [[b"a"], [b"b"]]
    assert [list(step) for step in lists["scores"]] == [[1.0], [2.0, 3.0]]
