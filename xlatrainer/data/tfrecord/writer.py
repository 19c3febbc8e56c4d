"""Examples as bytes, and files of them, as TensorFlow writes and reads them."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from xlatrainer.data.tfrecord.framing import COMPRESSIONS, crc_function, frame
from xlatrainer.storage.publishing import published
from xlatrainer.storage.systems import Path

__all__ = ["TfRecordWriter", "encode_example", "encode_sequence_example"]

_BYTES, _FLOAT, _INT64 = 1, 2, 3  # the field of a Feature that holds such a list

Values = Any
"""Of a feature: a number, `str` or `bytes`, a sequence of them, or an array or tensor of any shape."""


def encode_example(features: Mapping[str, Values]) -> bytes:
    """The bytes of a `tf.train.Example`.

    Args:
        features: By name: integers and booleans become int64, floats float32, strings UTF-8; arrays and tensors are
            flattened, and those of uint8 become one byte string. An empty list is a feature without a kind.

    Raises:
        TypeError: For other values, or a list of different kinds.
        ValueError: For integers that int64 does not hold.
    """
    return _field(1, _features(features))


def encode_sequence_example(context: Mapping[str, Values], feature_lists: Mapping[str, Sequence[Values]]) -> bytes:
    """The bytes of a `tf.train.SequenceExample`.

    Args:
        context: As for `encode_example`.
        feature_lists: By name a sequence with the values of each step.
    """
    lists = b"".join(
        _field(1, _field(1, name.encode()) + _field(2, b"".join(_field(1, _feature(name, step)) for step in steps)))
        for name, steps in feature_lists.items()
    )
    return _field(1, _features(context)) + _field(2, lists)


class TfRecordWriter:
    """Writes a TFRecord file, which appears under its name when it is closed.

    An exception in the `with` block leaves what was there before.

    Args:
        path: A local path or URL. A file there is replaced; the folder must exist.
        compression: "" (default), "ZLIB" or "GZIP".

    Raises:
        ImportError: If google-crc32c is not installed.
        ValueError: For another compression.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "digits.tfrecord")
        >>> with TfRecordWriter(path) as writer:
        ...     writer.write({"label": 3, "pixels": [0.0] * 4})
        >>> os.path.getsize(path)
        66
    """

    def __init__(self, path: Path, compression: str = "") -> None:
        if compression not in COMPRESSIONS:
            raise ValueError(f"the compression {compression!r} is none of {', '.join(map(repr, COMPRESSIONS))}")
        self.path = os.fspath(path)
        self._crc = crc_function()
        bits = zlib.MAX_WBITS | (16 if compression == "GZIP" else 0)
        self._compress = zlib.compressobj(wbits=bits) if compression else None
        self._publication = contextlib.ExitStack()
        self._file = self._publication.enter_context(published(path))

    def write(self, record: bytes | Mapping[str, Values]) -> None:
        """Write one record: bytes, or the features of an Example."""
        data = encode_example(record) if isinstance(record, Mapping) else bytes(record)
        before, behind = frame(data, self._crc)
        for part in (before, data, behind):
            self._file.write(part if self._compress is None else self._compress.compress(part))

    def close(self) -> None:
        """Write what is left, and give the file its name."""
        if self._compress is not None:
            self._file.write(self._compress.flush())
            self._compress = None
        self._publication.close()

    def __enter__(self) -> TfRecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._publication.__exit__(kind, error, at)


def _features(features: Mapping[str, Values]) -> bytes:
    return b"".join(
        _field(1, _field(1, name.encode()) + _field(2, _feature(name, value))) for name, value in features.items()
    )


def _feature(name: str, value: Values) -> bytes:
    kind, content = _list(name, value)
    return _field(kind, content) if kind else b""


def _list(name: str, value: Values) -> tuple[int, bytes]:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, str | bytes | bytearray | memoryview):
        value = [value]
    if isinstance(value, np.ndarray | np.generic):
        return _list_of_array(name, np.asarray(value))
    values = list(value) if isinstance(value, Sequence) else [value]
    if not values:
        return 0, b""
    if all(isinstance(each, str | bytes | bytearray | memoryview) for each in values):
        return _BYTES, b"".join(_field(1, each.encode() if isinstance(each, str) else bytes(each)) for each in values)
    if all(isinstance(each, int | np.integer | np.bool_) for each in values):
        return _INT64, _field(1, b"".join(_varint(_signed(name, int(each))) for each in values))
    if all(isinstance(each, int | float | np.number) for each in values):
        return _FLOAT, _field(1, struct.pack(f"<{len(values)}f", *values))
    kinds = sorted({type(each).__name__ for each in values})
    raise TypeError(
        f"the feature {name!r} holds {', '.join(kinds)}; accepted are integers, floats, str or bytes, lists of one of "
        f"these, arrays and tensors"
    )


def _list_of_array(name: str, array: np.ndarray) -> tuple[int, bytes]:
    if array.dtype == np.uint8 and array.ndim:
        return _BYTES, _field(1, array.tobytes())
    if array.dtype.kind in "iub":
        return _INT64, _field(1, b"".join(_varint(_signed(name, each)) for each in map(int, array.ravel().tolist())))
    if array.dtype.kind == "f":
        return _FLOAT, _field(1, array.astype("<f4").tobytes())
    raise TypeError(f"the feature {name!r} is an array of {array.dtype}; accepted are integers, booleans and floats")


def _signed(name: str, value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"the feature {name!r} holds {value}, which is no int64")
    return value & 0xFFFFFFFFFFFFFFFF


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes([value])
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
