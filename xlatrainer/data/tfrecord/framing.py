"""How records lie in a TFRecord file: length, checksum of the length, data, checksum of the data.

Lengths are 8 bytes, checksums 4, little-endian; a checksum is a masked CRC-32C. Owns checksums, compression, what is
told of damage, and the offsets of records. Knows nothing of what the records hold.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from xlatrainer.errors import RecordError
from xlatrainer.optional import require
from xlatrainer.storage.files import open_file
from xlatrainer.storage.systems import Path

__all__ = ["COMPRESSIONS", "OVERHEAD", "Damage", "Source", "crc_function", "frame", "frames", "masked", "offsets"]

COMPRESSIONS = ("", "ZLIB", "GZIP")
OVERHEAD = 16  # bytes of a record beside its data

_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 20  # bytes that are asked for at once while it is not known whether they are there
_MOST_LENGTHS = 4096
_LOCAL_BUFFER = 1 << 17  # a larger one does not fit into the processor's cache
_WINDOW_BITS = {"ZLIB": zlib.MAX_WBITS, "GZIP": zlib.MAX_WBITS | 16}


def crc_function() -> Callable[[Any], int]:
    """CRC-32C of bytes.

    Raises:
        ImportError: If google-crc32c is not installed; the message has the command.
    """
    return require("google_crc32c", "reading or writing TFRecord files", 'pip install "xlatrainer[tfrecord]"').value


def masked(crc: int) -> int:
    """A CRC-32C as TFRecord files store it."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes, crc: Callable[[Any], int]) -> tuple[bytes, bytes]:
    """What stands before and behind `data` in a file."""
    length = _LENGTH.pack(len(data))
    return length + _CRC.pack(masked(crc(length))), _CRC.pack(masked(crc(data)))


@dataclass
class Damage:
    """What was left out because it was damaged.

    Attributes:
        skip: Whether damage is left out; otherwise it is an error.
        records: How often something was left out: a record with a wrong checksum, or the rest of a file from where a
            length is damaged or the file is cut short.
    """

    skip: bool = False
    records: int = 0


class Source:
    """An open TFRecord file.

    Args:
        path: A local path or URL.
        compression: "" (default), "ZLIB" or "GZIP".
        buffer_size: Bytes that are read or decompressed at once. Local files are read in at most 128 KiB.

    Attributes:
        file: Gives the decompressed contents.
        size: Of these in bytes; None for compressed files, whose size nobody knows before the end.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If google-crc32c is not installed.
        ValueError: For another compression, or a buffer size below 1.
    """

    def __init__(self, path: Path, compression: str = "", buffer_size: int = 16 << 20) -> None:
        if compression not in COMPRESSIONS:
            raise ValueError(f"the compression {compression!r} is none of {', '.join(map(repr, COMPRESSIONS))}")
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, got {buffer_size}")
        crc_function()  # an error now, not at the first record
        self.path = os.fspath(path)
        self.compression = compression
        raw: Any = open_file(path, "rb")
        self.size: int | None
        if isinstance(raw, io.BufferedReader):  # of this machine
            self.size = size = os.fstat(raw.fileno()).st_size
            raw = raw.detach()
            buffer_size = min(buffer_size, _LOCAL_BUFFER)
        else:
            self.size = size = raw.size
        if compression:
            raw = _Inflated(raw, _WINDOW_BITS[compression], min(buffer_size, max(size, 1 << 16)))
            self.size = None
        self.file: IO[bytes] = io.BufferedReader(raw, buffer_size)

    @classmethod
    def of_bytes(cls, content: bytes, path: str) -> Source:
        """Over a part of the file `path` that has been read."""
        self = cls.__new__(cls)
        self.path, self.compression, self.size, self.file = path, "", len(content), io.BytesIO(content)
        return self

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def frames(source: Source, damage: Damage, number: int = 0, offset: int = 0) -> Iterator[bytes]:
    """The data of the records from the file's position on, each with both checksums checked.

    Args:
        source: The file.
        damage: Says whether damaged records are left out, and counts them.
        number: Of the record at this position, for messages. Default 0.
        offset: Of this position, for messages. Default 0.

    Raises:
        RecordError: For damage; the records before it have been given.
    """
    crc, read = crc_function(), source.file.read
    end = None if source.size is None else source.size + offset
    unpack_crc = _CRC.unpack
    lengths: dict[bytes, int] = {}  # of headers that were checked: records of one length have the same
    try:
        while header := read(12):
            length = lengths.get(header)
            if length is None:
                length = _length(header, crc)
                if len(lengths) < _MOST_LENGTHS:
                    lengths[header] = length
            if end is None:
                data = _read_unknown(read, length)
            elif length > end - offset - OVERHEAD:
                raise _Lost(f"it has {length:,} bytes, the file holds {max(end - offset - OVERHEAD, 0):,} more")
            else:
                data = read(length)
            footer = read(4)
            if len(data) != length or len(footer) != 4:
                raise _Lost(f"the file ends within it, after {len(data):,} of its {length:,} bytes")
            value = crc(data)
            if (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF == unpack_crc(footer)[0]:
                yield data
            elif damage.skip:
                damage.records += 1  # its length is right: the next record is where it should be
            else:
                raise _Lost("its data do not have the checksum that is stored with them")
            offset += OVERHEAD + length
            number += 1
    except (_Lost, zlib.error, EOFError) as error:
        if damage.skip:
            damage.records += 1
            return
        raise _explained(error, source, number, offset) from None


def offsets(source: Source) -> list[int]:
    """Where the records of an uncompressed file start, and where the last one ends. Their data are not read.

    Raises:
        RecordError: If a length is damaged, or the file is cut short.
    """
    crc, file, found = crc_function(), source.file, [0]
    assert source.size is not None
    try:
        while header := file.read(12):
            length = _length(header, crc)
            end = found[-1] + OVERHEAD + length
            if end > source.size:
                raise _Lost(f"it has {length:,} bytes, the file holds {source.size - found[-1] - OVERHEAD:,} more")
            file.seek(end)
            found.append(end)
    except _Lost as error:
        raise _explained(error, source, len(found) - 1, found[-1]) from None
    return found


class _Lost(Exception):
    """What is wrong with a record."""


def _length(header: bytes, crc: Callable[[Any], int]) -> int:
    if len(header) != 12:
        raise _Lost(f"the file ends within its first {OVERHEAD - 4} bytes")
    length, stored = _HEADER.unpack(header)
    if masked(crc(header[:8])) != stored:
        raise _Lost("its length does not have the checksum that is stored with it")
    return int(length)


def _read_unknown(read: Callable[[int], bytes], length: int) -> bytes:
    """Read `length` bytes in pieces: what is not there is never allocated."""
    if length <= _PIECE:
        return read(length)
    pieces, missing = [], length
    while missing and (piece := read(min(missing, _PIECE))):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _explained(error: Exception, source: Source, number: int, offset: int) -> RecordError:
    what = f"it cannot be decompressed ({error})" if isinstance(error, zlib.error | EOFError) else str(error)
    where = "of the decompressed contents" if source.compression else "of the file"
    message = f"{source.path}: record {number} at byte {offset:,} {where} is damaged: {what}"
    if number == 0 and offset == 0:
        message += f". {_foreign(source)}"
    return RecordError(message, source.path, number, offset)


def _foreign(source: Source) -> str:
    """What a file is whose first record is wrong."""
    with open_file(source.path, "rb") as file:
        start = file.read(2)
    if start == b"\x1f\x8b" and source.compression != "GZIP":
        return 'It is a gzip file: give compression="GZIP"'
    if start[:1] == b"\x78" and source.compression != "ZLIB":
        return 'It looks like a zlib stream: give compression="ZLIB"'
    return f"Is it a TFRecord file, with the compression {source.compression!r}?"


class _Inflated(io.RawIOBase):
    """The decompressed contents of a zlib stream, or of gzip members one after another."""

    def __init__(self, raw: Any, window_bits: int, piece: int) -> None:
        self._raw = raw
        self._window_bits = window_bits
        self._piece = piece
        self._inflate = zlib.decompressobj(window_bits)
        self._waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._inflate.eof and not self._next_member():
                return 0
            self._waiting = self._waiting or self._raw.read(self._piece)
            if not self._waiting:
                raise EOFError("the compressed stream is cut short")
            data = self._inflate.decompress(self._waiting, len(buffer))
            self._waiting = self._inflate.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)

    def _next_member(self) -> bool:
        """Whether another gzip member follows; it is begun."""
        left = self._inflate.unused_data or self._waiting or self._raw.read(self._piece)
        if not left:
            return False
        if self._window_bits == zlib.MAX_WBITS:
            raise EOFError("something follows the end of the compressed stream")
        self._waiting = left
        self._inflate = zlib.decompressobj(self._window_bits)
        return True

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
