"""`tf.train.Example` and `tf.train.SequenceExample`, read from their bytes without protobuf or TensorFlow.

An Example is a map from names to features, each a list of byte strings, of float32 or of int64; a SequenceExample has
one as its context, and a map from names to lists of features. Numbers may be packed or not, fields in any order,
unknown fields are passed over, and what protobuf merges is merged.

Owns the bytes of these messages. What becomes of the values (tensors, shapes) is the business of `features`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from xlatrainer.errors import RecordError

__all__ = ["ExampleParser", "Value", "parse_example", "parse_sequence_example"]

Value = list[bytes] | np.ndarray
"""Of one feature: byte strings; float32 or int64, of shape (number of values,). Without a kind it has no strings."""

_FLOAT = np.dtype("<f4")
_INT64 = np.dtype("<i8")
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 0x0A, 0x12, 0x1A
_LENGTH_DELIMITED, _FIXED32, _VARINT = 2, 5, 0
_MOST_LAYOUTS = 4096  # that are kept; features of ever new sizes, as images are, do not fill the memory
_LARGE = 64  # bytes of packed numbers from which NumPy decodes them faster than Python

_frombuffer, _array = np.frombuffer, np.array


_Layout = list[Any]
"""The bytes of an entry before its values, its name (None if it is not wanted), its kind, the number of these bytes,
that with the values, and the layout that came behind it last time."""


class ExampleParser:
    """Reads Examples of which many have the same features.

    A map entry of the same name, kind and size begins with the same bytes. Those that have been read in full once are
    remembered: where they come again, the place of the values is known.

    Args:
        names: Of the features that are wanted; default None, all.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = None if names is None else frozenset(names)
        self._layouts: dict[bytes, list[_Layout]] = {}  # by the first four bytes of an entry
        self._first: _Layout | None = None  # that the latest record began with
        self._number_of_layouts = 0

    def parse(self, record: bytes) -> dict[str, Value]:
        """The features of an Example by name.

        Raises:
            RecordError: If `record` is no Example.
        """
        try:
            return self._parse(record)
        except (IndexError, ValueError, struct.error) as error:
            raise RecordError(f"it is no tf.train.Example: {error}") from None

    def _parse(self, record: bytes) -> dict[str, Value]:
        found: dict[str, Value] = {}
        end = len(record)
        if not end:
            return found
        if end < 128:
            position = 2
            is_plain = record[0] == 0x0A and record[1] == end - 2
        else:
            size, position = _varint(record, 1)
            is_plain = record[0] == 0x0A and position + size == end
        if not is_plain:
            for start, stop in _messages(record, 0, end, 1):
                self._add_features(record, start, stop, found)
            return found
        startswith = record.startswith
        before, layout = None, self._first
        while position < end:
            if layout is None or not startswith(layout[0], position) or position + layout[4] > end:
                layout = self._known_layout(record, position, end)
                if layout is None:
                    position = self._add_feature(record, position, end, found)
                    continue
                if before is None:
                    self._first = layout
                else:
                    before[5] = layout
            _, name, kind, start, total, following = before = layout
            layout = following
            start += position
            position += total
            if name is None:
                continue
            if kind == _FLOAT_LIST:
                found[name] = _frombuffer(record, _FLOAT, (position - start) >> 2, start).copy()
            elif kind == _BYTES_LIST:
                found[name] = [record[start:position]]
            elif position - start == 1 and record[start] < 128:
                found[name] = _array((record[start],), _INT64)
            elif position - start == 2 and record[start] >= 128 > record[start + 1]:
                found[name] = _array((record[start] & 127 | record[start + 1] << 7,), _INT64)
            else:
                found[name] = _packed_int64(record, start, position)
        return found

    def _known_layout(self, record: bytes, position: int, end: int) -> _Layout | None:
        for layout in self._layouts.get(record[position : position + 4], ()):
            if record.startswith(layout[0], position) and position + layout[4] <= end:
                return layout
        return None

    def _add_features(self, record: bytes, position: int, end: int, found: dict[str, Value]) -> None:
        while position < end:
            position = self._add_feature(record, position, end, found)

    def _add_feature(self, record: bytes, position: int, end: int, found: dict[str, Value]) -> int:
        """Read the field of a Features message at `position`; returns where it ends."""
        tag, start = _varint(record, position)
        if tag != 0x0A:
            return _after(record, start, end, tag)
        start, stop = _extent(record, start, end)
        name, values = b"", []
        for field, low, high in _fields(record, start, stop):
            if field == 1:
                name = record[low:high]
            elif field == 2:
                values.append((low, high))
        text = name.decode("utf-8")
        is_wanted = self._names is None or text in self._names
        if is_wanted:
            found[text] = _feature(record, values)
        if len(values) == 1 and values[0][1] == stop and self._number_of_layouts < _MOST_LAYOUTS:
            self._remember(record, position, values[0][0], stop, text if is_wanted else None)
        return stop

    def _remember(self, record: bytes, position: int, start: int, stop: int, name: str | None) -> None:
        """Remember an entry whose value, from `start`, is a list of one field that takes all of it."""
        if start == stop:
            return
        kind, low = record[start], start + 1
        if kind not in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
            return
        low, high = _extent(record, low, stop)
        if high != stop or low == high or record[low] != 0x0A:
            return
        low, high = _extent(record, low + 1, stop)
        if high != stop or (kind != _BYTES_LIST and low == high):
            return
        layout = [record[position:low], name, kind, low - position, stop - position, None]
        self._layouts.setdefault(record[position : position + 4], []).append(layout)
        self._number_of_layouts += 1


def parse_example(record: bytes, names: Collection[str] | None = None) -> dict[str, Value]:
    """The features of a serialized `tf.train.Example` by name: byte strings, or arrays of float32 or int64.

    Args:
        record: Its bytes.
        names: Of the features that are wanted; default None, all.

    Raises:
        RecordError: If `record` is no Example.

    Example:
        >>> from xlatrainer.data.tfrecord.writer import encode_example
        >>> parse_example(encode_example({"label": 3, "name": "three"}))
        {'label': array([3]), 'name': [b'three']}
    """
    return ExampleParser(names).parse(record)


def parse_sequence_example(record: bytes) -> tuple[dict[str, Value], dict[str, list[Value]]]:
    """The context and the feature lists of a serialized `tf.train.SequenceExample`.

    Returns:
        The features of the context by name, and by name the list of features, one for each step.

    Raises:
        RecordError: If `record` is no SequenceExample.
    """
    context: dict[str, Value] = {}
    lists: dict[str, list[Value]] = {}
    parser = ExampleParser()
    try:
        for field, start, stop in _fields(record, 0, len(record)):
            if field == 1:
                parser._add_features(record, start, stop, context)
            elif field == 2:
                for low, high in _messages(record, start, stop, 1):
                    name, steps = _feature_list(record, low, high)
                    lists[name] = steps
    except (IndexError, ValueError, struct.error) as error:
        raise RecordError(f"it is no tf.train.SequenceExample: {error}") from None
    return context, lists


def _feature_list(record: bytes, start: int, stop: int) -> tuple[str, list[Value]]:
    name, steps = b"", []
    for field, low, high in _fields(record, start, stop):
        if field == 1:
            name = record[low:high]
        elif field == 2:
            steps += [_feature(record, [each]) for each in _messages(record, low, high, 1)]
    return name.decode("utf-8"), steps


def _feature(record: bytes, places: list[tuple[int, int]]) -> Value:
    """The values of a Feature. It holds one list: the last of several kinds counts, several of a kind are one."""
    kind = 0
    parts: list[tuple[int, int]] = []
    for place in places:
        for field, low, high in _fields(record, *place):
            if field not in (1, 2, 3):
                continue
            if field != kind:
                kind, parts = field, []
            parts.append((low, high))
    if kind in (0, 1):
        return [record[low:high] for part in parts for low, high in _messages(record, *part, 1)]
    read = _floats if kind == 2 else _int64s
    values = [each for part in parts for each in read(record, *part)]
    if len(values) == 1:
        return values[0]
    return np.concatenate(values) if values else np.empty(0, _FLOAT if kind == 2 else _INT64)


def _floats(record: bytes, start: int, stop: int) -> Iterator[np.ndarray]:
    loose = []
    for tag, low, high in _wire(record, start, stop):
        if tag >> 3 != 1:
            continue
        if tag & 7 == _FIXED32:
            loose.append((low, high))
        elif tag & 7 == _LENGTH_DELIMITED:
            if (high - low) % 4:
                raise ValueError(f"{high - low} bytes are no float32s")
            yield from _joined(record, loose)
            yield np.frombuffer(record, _FLOAT, (high - low) // 4, low).copy()
        else:
            raise ValueError(f"a float of wire type {tag & 7}")
    yield from _joined(record, loose)


def _joined(record: bytes, places: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    if places:
        yield np.frombuffer(b"".join([record[low:high] for low, high in places]), _FLOAT).copy()
        places.clear()


def _int64s(record: bytes, start: int, stop: int) -> Iterator[np.ndarray]:
    for tag, low, high in _wire(record, start, stop):
        if tag >> 3 != 1:
            continue
        if tag & 7 not in (_VARINT, _LENGTH_DELIMITED):
            raise ValueError(f"an int64 of wire type {tag & 7}")
        yield _packed_int64(record, low, high)


def _packed_int64(record: bytes, position: int, end: int) -> np.ndarray:
    """The varints that fill these bytes, as int64."""
    if end - position >= _LARGE:
        return _many_int64(np.frombuffer(record, np.uint8, end - position, position))
    values = []
    while position < end:
        value, position = _varint(record, position)
        values.append(value - (1 << 64) if value >> 63 else value)
    if position != end:
        raise ValueError("a number crosses the end of its list")
    return np.array(values, _INT64)


def _many_int64(data: np.ndarray) -> np.ndarray:
    """The same for many: byte number i of all varints at once."""
    last = np.flatnonzero(data < 128)
    if not len(last) or last[-1] != len(data) - 1:
        raise ValueError("a number crosses the end of its list")
    first = np.concatenate([[0], last[:-1] + 1])
    sizes = last - first + 1
    if sizes.max() > 10:
        raise ValueError("a number of more than ten bytes")
    values = np.zeros(len(last), np.uint64)
    for number in range(int(sizes.max())):
        has = sizes > number
        seven = (data[first[has] + number] & 127).astype(np.uint64)
        values[has] |= seven << np.uint64(7 * number)
    return values.view(np.int64)


def _varint(record: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, of 64 bits, and where it ends."""
    byte = record[position]
    if byte < 128:
        return byte, position + 1
    value, shift = byte & 127, 7
    while True:
        position += 1
        byte = record[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, position + 1
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than ten bytes")


def _extent(record: bytes, position: int, end: int) -> tuple[int, int]:
    """Where the bytes of a length-delimited field start and stop; `position` is behind its tag."""
    size, start = _varint(record, position)
    if start + size > end:
        raise ValueError(f"a field of {size} bytes, where {max(end - start, 0)} are left")
    return start, start + size


def _after(record: bytes, position: int, end: int, tag: int) -> int:
    """Where a field ends; `position` is behind its tag."""
    return _place(record, position, end, tag)[1]


def _place(record: bytes, position: int, end: int, tag: int) -> tuple[int, int]:
    kind = tag & 7
    if tag < 8:
        raise ValueError("a field without a number")
    if kind == _LENGTH_DELIMITED:
        return _extent(record, position, end)
    if kind == _VARINT:
        stop = _varint(record, position)[1]
    elif kind in (1, _FIXED32):
        stop = position + (8 if kind == 1 else 4)
    else:
        raise ValueError(f"a field of wire type {kind}")
    if stop > end:
        raise ValueError("a field crosses the end of its message")
    return position, stop


def _wire(record: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The fields of a message: tag, start and stop."""
    while position < end:
        tag, position = _varint(record, position)
        start, position = _place(record, position, end, tag)
        yield tag, start, position


def _fields(record: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The length-delimited fields of a message: number, start and stop."""
    for tag, start, stop in _wire(record, position, end):
        if tag & 7 == _LENGTH_DELIMITED:
            yield tag >> 3, start, stop


def _messages(record: bytes, position: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """Start and stop of the length-delimited fields of one number."""
    for field, start, stop in _fields(record, position, end):
        if field == number:
            yield start, stop
