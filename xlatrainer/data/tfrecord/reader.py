"""`TfRecordReader`: the records of one file, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from xlatrainer.data.tfrecord.example import ExampleParser, parse_sequence_example
from xlatrainer.data.tfrecord.features import Transform, apply_transforms, check_transforms
from xlatrainer.data.tfrecord.framing import Damage, Source, frames
from xlatrainer.storage.systems import Path

__all__ = ["OnDamage", "TfRecordReader", "damage_of"]

OnDamage = Literal["error", "skip"]


def damage_of(on_damage: OnDamage) -> Damage:
    """A new count of damage; raises `ValueError` for another word than "error" and "skip"."""
    if on_damage not in ("error", "skip"):
        raise ValueError(f"on_damage={on_damage!r}: accepted are 'error' and 'skip'")
    return Damage(skip=on_damage == "skip")


class TfRecordReader:
    """Reads a TFRecord file from its begin to its end, without TensorFlow. Iterating gives its Examples.

    Every record's checksums are checked, and a length is believed only where the file holds as many bytes.

    Args:
        path: A local path or URL.
        compression: "" (default), "ZLIB" or "GZIP".
        buffer_size: Bytes that are read or decompressed at once; default 16 MiB. Local files are read in at most
            128 KiB. The records are the same for any size.
        transforms: By name of a feature a function that is called with its tensor, or "STR" for text in UTF-8; of
            several byte strings with each. Default none.
        on_damage: "error" (default); or "skip", which leaves out records whose data are damaged, and all that follows
            where a length is, as nothing tells where the next record begins.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If google-crc32c is not installed.
        RecordError: When reading damage; it names the file, the record and the byte.
        ValueError: For another compression or transform.

    Example:
        >>> import os, tempfile
        >>> from xlatrainer.data.tfrecord.writer import TfRecordWriter
        >>> path = os.path.join(tempfile.mkdtemp(), "words.tfrecord")
        >>> with TfRecordWriter(path) as writer:
        ...     writer.write({"word": "one", "number": 1})
        >>> with TfRecordReader(path, transforms={"word": "STR"}) as reader:
        ...     print(list(reader))
        [{'word': 'one', 'number': tensor([1])}]
    """

    def __init__(
        self,
        path: Path,
        compression: str = "",
        buffer_size: int = 16 * 1024 * 1024,
        transforms: Mapping[str, Transform] | None = None,
        *,
        on_damage: OnDamage = "error",
    ) -> None:
        self._transforms = check_transforms(transforms)
        self._damage = damage_of(on_damage)
        self._source = Source(path, compression, buffer_size)
        self._frames = frames(self._source, self._damage)
        self._parser = ExampleParser()

    @property
    def num_damaged(self) -> int:
        """How often something damaged was left out so far: a record, or the rest of the file."""
        return self._damage.records

    def read_record(self) -> bytes | None:
        """The data of the next record; None at the end, and from then on."""
        return next(self._frames, None)

    def read_example(self) -> dict[str, Any] | None:
        """The features of the next Example by name; None at the end, and from then on.

        int64 and float32 values are tensors of shape (number,), a byte string is uint8 of shape (length,), several are
        a list of such; what has a transform is what it gives.
        """
        record = self.read_record()
        return None if record is None else apply_transforms(self._parser.parse(record), self._transforms)

    def read_sequence_example(self) -> tuple[dict[str, Any], dict[str, list[Any]]] | None:
        """The context and the feature lists of the next SequenceExample; None at the end.

        A feature list has an item for each step, of the form that `read_example` gives; transforms are called for each.
        """
        record = self.read_record()
        if record is None:
            return None
        context, lists = parse_sequence_example(record)
        steps = {
            name: [apply_transforms({name: value}, self._transforms)[name] for value in values]
            for name, values in lists.items()
        }
        return apply_transforms(context, self._transforms), steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (example := self.read_example()) is not None:
            yield example

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def __enter__(self) -> TfRecordReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
