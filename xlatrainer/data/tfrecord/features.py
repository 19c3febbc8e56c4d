"""What becomes of the values in an Example: tensors, strings, and what a `Feature` asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xlatrainer.data.tfrecord.example import Value

__all__ = ["STR", "Feature", "Transform", "apply_transforms", "check_transforms", "decode", "to_tensor"]

STR = "STR"
"""As a transform: byte strings become `str`, by UTF-8."""

Transform = str | Callable[[Any], Any]

_KINDS = "torch.uint8 for a byte string as it is, str, bytes, or a dtype of numbers"


@dataclass(frozen=True)
class Feature:
    """What a feature of an Example is to become.

    Args:
        dtype: Of numbers: int64 values become any dtype, float32 values a floating one. For byte strings:
            `torch.uint8`, `str` (UTF-8) or `bytes`. Default `torch.float32`.
        shape: That the values are given, whose number must fit; `()` (default) is a single value, None keeps as many
            as there are, of shape (number,), or a list of strings. A byte string as uint8 has as many values as bytes.
        default: Stands for a feature that is missing or has no values: a number or string for each value, a tensor, or
            anything else. Default None: it must be there.
        transform: A function that is called with the result (not with `default`), to decode an image say. Default none.

    Example:
        >>> from xlatrainer.data.tfrecord.example import parse_example
        >>> from xlatrainer.data.tfrecord.writer import encode_example
        >>> record = encode_example({"pixels": [0.0, 0.5, 1.0, 0.0], "label": 3})
        >>> decode(parse_example(record), {"pixels": Feature(shape=(2, 2)), "label": Feature(torch.int64)})
        {'pixels': tensor([[0.0000, 0.5000],
                [1.0000, 0.0000]]), 'label': tensor(3)}
    """

    dtype: torch.dtype | type[str] | type[bytes] = torch.float32
    shape: tuple[int, ...] | None = ()
    default: Any = None
    transform: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) and self.dtype not in (str, bytes):
            raise ValueError(f"the dtype {self.dtype!r} is none of: {_KINDS}")
        if self.dtype in (str, bytes) and self.shape not in ((), None):
            raise ValueError(f"strings have the shape () or None, got {self.shape}")


def to_tensor(value: Value) -> Tensor | list[Tensor]:
    """Numbers as a tensor of shape (number,), a byte string as uint8 of shape (length,), several as a list of these."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    tensors = [_bytes_tensor(each) for each in value]
    return tensors[0] if len(tensors) == 1 else tensors


def check_transforms(transforms: Mapping[str, Transform] | None) -> dict[str, Transform]:
    """The transforms by name; raises `ValueError` for what is neither callable nor `STR`."""
    for name, transform in (transforms or {}).items():
        if not callable(transform) and transform != STR:
            raise ValueError(f"Invalid transform: {transform!r} for {name!r}; accepted are functions and {STR!r}")
    return dict(transforms or {})


def apply_transforms(values: Mapping[str, Value], transforms: Mapping[str, Transform]) -> dict[str, Any]:
    """The features as `to_tensor` gives them, or as their transforms do; of several byte strings each one."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        transform = transforms.get(name)
        if transform is None:
            found[name] = to_tensor(value)
        elif transform == STR:
            if isinstance(value, np.ndarray):
                raise TypeError(f"the transform {STR!r} is for byte strings; {name!r} holds {value.dtype} numbers")
            texts = [each.decode("utf-8") for each in value]
            found[name] = texts[0] if len(texts) == 1 else texts
        else:
            assert callable(transform)
            tensor = to_tensor(value)
            found[name] = [transform(each) for each in tensor] if isinstance(tensor, list) else transform(tensor)
    return found


def decode(values: Mapping[str, Value], features: Mapping[str, Feature]) -> dict[str, Any]:
    """What `features` ask for.

    Raises:
        KeyError: If a feature without a default is missing.
        TypeError: If it holds values of another kind.
        ValueError: If their number does not fit the shape.
    """
    return {name: _decode(name, values.get(name), feature) for name, feature in features.items()}


def _decode(name: str, value: Value | None, feature: Feature) -> Any:
    if value is None or (len(value) == 0 and feature.default is not None):
        if feature.default is None:
            raise KeyError(f"the Example has no feature {name!r}, and it has no default")
        return _default(feature)
    result = _strings(name, value, feature) if feature.dtype in (str, bytes) else _numbers(name, value, feature)
    return result if feature.transform is None else feature.transform(result)


def _default(feature: Feature) -> Any:
    default = feature.default
    if isinstance(feature.dtype, torch.dtype) and isinstance(default, int | float):
        return torch.full((0,) if feature.shape is None else feature.shape, default, dtype=feature.dtype)
    return default.clone() if isinstance(default, Tensor) else default


def _strings(name: str, value: Value, feature: Feature) -> Any:
    if isinstance(value, np.ndarray):
        raise TypeError(f"the feature {name!r} holds {value.dtype} numbers, asked for are strings")
    texts = [each.decode("utf-8") for each in value] if feature.dtype is str else value
    if feature.shape is None:
        return texts
    if len(texts) != 1:
        raise ValueError(
            f"the feature {name!r} holds {len(texts)} strings, asked for is one; shape=None takes any number"
        )
    return texts[0]


def _numbers(name: str, value: Value, feature: Feature) -> Tensor:
    assert isinstance(feature.dtype, torch.dtype)
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32 and not feature.dtype.is_floating_point and len(value):
            raise TypeError(f"the feature {name!r} holds float32 numbers, asked for is {feature.dtype}")
        tensor = torch.from_numpy(value).to(feature.dtype)
    elif feature.dtype is torch.uint8 or not value:
        if len(value) > 1:
            raise ValueError(f"the feature {name!r} holds {len(value)} byte strings, asked for is one")
        tensor = _bytes_tensor(b"".join(value)).to(feature.dtype)
    else:
        raise TypeError(f"the feature {name!r} holds byte strings, asked for is {feature.dtype}; accepted: {_KINDS}")
    if feature.shape is None:
        return tensor
    if tensor.numel() != math.prod(feature.shape):
        raise ValueError(
            f"the feature {name!r} holds {tensor.numel()} values, the shape {feature.shape} takes "
            f"{math.prod(feature.shape)}; shape=None takes any number"
        )
    return tensor.reshape(feature.shape)


def _bytes_tensor(value: bytes) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
