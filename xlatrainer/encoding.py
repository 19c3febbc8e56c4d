"""A nested state as JSON and a list of tensors, and back. Nothing in it is code, and reading it executes none.

Owns which Python types a checkpoint or a cached sample may hold. Knows nothing of files, models or devices: tensors
are passed on as they are, and none of their values is read.
"""

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["TensorTable", "as_stored", "decode", "encode", "from_stored"]

_TYPE = "__type__"  # marks a JSON object that stands for something else than a dict with strings as keys


class TensorTable:
    """Numbers the tensors that it is shown, each object once.

    Args:
        first: The number of the first one. Default 0.

    Attributes:
        tensors: The tensors in the order of their numbers.
    """

    def __init__(self, first: int = 0) -> None:
        self.tensors: list[Tensor] = []
        self._first = first
        self._numbers: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        """The number of `tensor`; a new one if it was not shown before."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = self._first + len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]


def encode(tree: Any, table: TensorTable, where: str) -> Any:
    """What `json.dumps` takes for `tree`; its tensors go into `table`.

    Args:
        tree: Tensors, NumPy arrays and numbers, plain numbers, strings, bytes, None, torch dtypes, and lists, tuples,
            sets, counters and mappings of them, however deep.
        table: Takes the tensors.
        where: What `tree` is called in messages.

    Raises:
        TypeError: For anything else: only executing code could read it back.

    Example:
        >>> table = TensorTable()
        >>> encode({"lr": 0.1, "betas": (0.9, float("inf"))}, table, "the state")
        {'lr': 0.1, 'betas': {'__type__': 'tuple', 'value': [0.9, {'__type__': 'float', 'value': 'inf'}]}}
    """
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else _tagged("float", repr(tree))
    if isinstance(tree, Tensor):
        _refuse_layout(tree, where)
        return _tagged("tensor", table.number(tree))
    if isinstance(tree, np.ndarray | np.generic) and tree.dtype.kind in "biufc":
        kind = "ndarray" if isinstance(tree, np.ndarray) else "number"
        return _tagged(kind, table.number(torch.from_numpy(np.array(tree))))
    if isinstance(tree, Mapping):
        return _encode_mapping(tree, table, where)
    if type(tree) in (list, tuple, torch.Size, set, frozenset):
        items = [encode(item, table, f"{where}[{index}]") for index, item in enumerate(tree)]
        return items if type(tree) is list else _tagged(type(tree).__name__.lower(), items)
    if type(tree) is complex:
        return _tagged("complex", [repr(tree.real), repr(tree.imag)])
    if type(tree) in (bytes, bytearray):
        return _tagged("bytes", base64.b64encode(tree).decode("ascii"))
    if isinstance(tree, torch.dtype):
        return _tagged("dtype", str(tree).removeprefix("torch."))
    raise TypeError(
        f"{where} is a {type(tree).__name__}, which cannot be saved: loading it would execute code. Accepted: tensors, "
        f"arrays, numbers, strings, bytes, None, torch dtypes, and lists, tuples, sets and dicts of them"
    )


def decode(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree that `encode` was given, with these tensors.

    Raises:
        ValueError: For what `encode` does not write.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TYPE not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind, content = value[_TYPE], value["value"]
    if kind == "tensor":
        return tensors[content]
    if kind == "ndarray":
        return tensors[content].numpy()
    if kind == "number":
        return tensors[content].numpy()[()]
    if kind == "dict" or kind == "counter":
        return _MAPPINGS[kind]({decode(key, tensors): decode(item, tensors) for key, item in content})
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, tensors) for item in content)
    if kind in _ATOMS:
        return _ATOMS[kind](content)
    raise ValueError(f"it holds a value of the unknown type {kind!r}")


def as_stored(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """These CPU tensors in the form that safetensors takes, and metadata to go with them, for `from_stored`.

    They become contiguous; those of complex128, the one dtype of torch's that safetensors does not have, pairs of
    floats.
    """
    pairs = [name for name, tensor in tensors.items() if tensor.dtype is torch.complex128]
    plain = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    stored = {
        name: (torch.view_as_real(tensor) if name in pairs else tensor).contiguous() for name, tensor in plain.items()
    }
    return stored, {"complex128": json.dumps(pairs)} if pairs else {}


def from_stored(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors that `as_stored` was given."""
    pairs = json.loads(metadata.get("complex128", "[]"))
    return {name: torch.view_as_complex(tensor) if name in pairs else tensor for name, tensor in tensors.items()}


def _encode_mapping(tree: Mapping[Any, Any], table: TensorTable, where: str) -> Any:
    plain = all(type(key) is str for key in tree) and _TYPE not in tree and not isinstance(tree, Counter)
    if plain:
        return {key: encode(item, table, f"{where}[{key!r}]") for key, item in tree.items()}
    pairs = [
        [encode(key, table, f"a key of {where}"), encode(item, table, f"{where}[{key!r}]")]
        for key, item in tree.items()
    ]
    return _tagged("counter" if isinstance(tree, Counter) else "dict", pairs)


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_TYPE: kind, "value": value}


def _refuse_layout(tensor: Tensor, where: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"{where} is a sparse or quantized tensor, which cannot be saved; make it dense")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"it names the dtype {name!r}, which this torch does not have")
    return found


_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "counter": Counter}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
}
_ATOMS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "bytes": lambda text: base64.b64decode(text),
    "dtype": _dtype,
}
