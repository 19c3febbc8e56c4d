"""What a checkpoint may hold, and that it comes back as it was."""

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from xlatrainer.encoding import TensorTable, decode, encode

PLAIN: list[Any] = [
    None,
    True,
    2**70,
    -1.5,
    math.inf,
    -math.inf,
    0.1 + 0.2,
    3 - 4j,
    "text",
    b"\x00\xff",
    torch.bfloat16,
    torch.Size([2, 3]),
    (1, [2, (3,)], {"a": (4,)}),
    {1: "a", (2, 3): "b", None: "c"},
    {"__type__": "of the user's own"},
    {1, 2},
    frozenset({3}),
    Counter({5: 2}),
    OrderedDict(b=1, a=2),
    [],
    {},
]


def there_and_back(tree: Any) -> Any:
    table = TensorTable()
    text = json.dumps(encode(tree, table, "the state"), allow_nan=False)
    return decode(json.loads(text), table.tensors)


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is (dict if isinstance(value, OrderedDict) else type(value))


def test_nan() -> None:
    assert math.isnan(there_and_back({"best": float("nan")})["best"])


def test_tensors_and_arrays() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    tree = {"t": tensor, "again": [tensor], "a": np.arange(3, dtype=np.uint32), "n": np.float32(0.5), "s": np.array(7)}
    table = TensorTable()
    encoded = encode(tree, table, "the state")
    assert len(table.tensors) == 4
    assert table.tensors[0] is tensor
    found = decode(encoded, table.tensors)
    assert found["t"] is found["again"][0]
    assert found["a"].dtype == np.uint32
    assert found["a"].tolist() == [0, 1, 2]
    assert type(found["n"]) is np.float32
    assert found["n"] == 0.5
    assert found["s"].shape == ()


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, Own()]}, r"the state\['a'\]\[1\] is a Own, which cannot be saved: loading it would execute code"),
        ({"f": print}, r"the state\['f'\] is a builtin_function_or_method"),
        ({Own(): 1}, r"a key of the state is a Own"),
        (np.array([Own()]), "the state is a ndarray"),
        (torch.eye(2).to_sparse(), "the state is a sparse or quantized tensor"),
    ],
)
def test_what_is_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(value, TensorTable(), "the state")


@pytest.mark.parametrize("kind", ["function", "unheard of"])
def test_unknown_types_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"a value of the unknown type '{kind}'"):
        decode({"a": {"__type__": kind, "value": "os.mkdir"}}, [])


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="the dtype 'manual_seed', which this torch does not have"):
        decode({"__type__": "dtype", "value": "manual_seed"}, [])
