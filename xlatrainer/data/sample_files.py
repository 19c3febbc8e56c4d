"""One sample as the bytes of a file, and back. Nothing in it is code, and reading it executes none.

A file is a header of 40 bytes and a body: a safetensors file in memory, with the sample's other data as JSON in its
metadata, compressed by zlib where that makes it much smaller. The header's checksum covers all of it, with the number
of the sample, so that neither a changed byte nor another sample's file is taken for it.
"""

import json
import struct
import zlib
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from xlatrainer.encoding import TensorTable, as_stored, decode, encode, from_stored

__all__ = ["DamagedSample", "decode_sample", "encode_sample"]

_MAGIC = b"xlasampl"
_VERSION = 1
# magic, version, whether it is compressed, two bytes unused, checksum, number, bytes of the body as stored and in all
_HEADER = struct.Struct("<8sBBHIQQQ")
_LEVEL = 1  # of zlib: higher ones take several times as long for a few percent
_WORTH_IT = 0.6  # of the size: a body that compression leaves larger is stored as it is, and read ten times as fast
_MOST_OUT_OF_A_BYTE = 1032  # deflate's limit: a larger body than that cannot be what the stored one unpacks to


class DamagedSample(ValueError):
    """The bytes are not those of this sample's file; says why."""


def encode_sample(sample: Any, number: int, compress: bool, where: str) -> bytes:
    """The contents of the file of a sample.

    Args:
        sample: Tensors, NumPy arrays, numbers, strings, bytes and None, in lists, tuples, sets and dicts.
        number: Its index in the dataset.
        compress: Whether to compress what becomes much smaller by it.
        where: What the sample is called in messages.

    Raises:
        TypeError: For a sample that holds anything else.

    Example:
        >>> content = encode_sample({"label": 3}, 7, True, "sample 7")
        >>> decode_sample(content, 7)
        {'label': 3}
    """
    table = TensorTable()
    tree = encode(sample, table, where)
    tensors, about = as_stored({str(place): tensor.cpu() for place, tensor in enumerate(table.tensors)})
    body = safetensors.torch.save(_apart(tensors), {**about, "sample": json.dumps(tree, allow_nan=False)})
    packed = zlib.compress(body, _LEVEL) if compress else body
    is_packed = len(packed) <= _WORTH_IT * len(body)
    stored = packed if is_packed else body
    fields = (number, len(stored), len(body))
    return _HEADER.pack(_MAGIC, _VERSION, is_packed, 0, _checksum(is_packed, fields, stored), *fields) + stored


def decode_sample(content: bytes, number: int) -> Any:
    """The sample that `encode_sample` was given: its tensors on the CPU, mappings as dicts.

    Raises:
        DamagedSample: If `content` is not the file of sample `number`, whole and unchanged. Nothing larger than the
            header says is allocated, and not before the checksum is known to be right.
    """
    if len(content) < _HEADER.size:
        raise DamagedSample(f"it has {len(content)} bytes, fewer than a header")
    magic, version, is_packed, unused, checksum, *fields = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise DamagedSample("it is no file of a cached sample")
    if version != _VERSION:
        raise DamagedSample(f"its version is {version}; this program reads version {_VERSION}")
    stored = memoryview(content)[_HEADER.size :]
    found, stored_size, size = fields
    if len(stored) != stored_size:
        raise DamagedSample(f"it has {len(stored)} bytes after its header, which says {stored_size}")
    if unused or is_packed not in (0, 1) or checksum != _checksum(bool(is_packed), (found, stored_size, size), stored):
        raise DamagedSample("its checksum is another than its contents have")
    if found != number:
        raise DamagedSample(f"it is the file of sample {found}")
    body = _unpacked(stored, size) if is_packed else bytes(stored)
    try:
        length = int.from_bytes(body[:8], "little")
        metadata = json.loads(body[8 : 8 + length])["__metadata__"]
        named = from_stored(safetensors.torch.load(body), metadata)
        return decode(json.loads(metadata["sample"]), [named[str(place)] for place in range(len(named))])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise DamagedSample(f"its contents make no sense, though their checksum is right: {error}") from error


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """These tensors without shared memory, which safetensors refuses."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return apart


def _checksum(is_packed: bool, fields: tuple[int, int, int], stored: bytes | memoryview) -> int:
    return zlib.crc32(stored, zlib.crc32(struct.pack("<BBQQQ", _VERSION, is_packed, *fields)))


def _unpacked(stored: memoryview, size: int) -> bytes:
    if size > _MOST_OUT_OF_A_BYTE * (len(stored) + 1):
        raise DamagedSample(f"it says that {len(stored)} bytes unpack to {size}")
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(stored, size)
    except zlib.error as error:
        raise DamagedSample(f"it cannot be unpacked: {error}") from error
    if len(body) != size or not unpacker.eof:
        raise DamagedSample(f"it unpacks to another size than the {size} bytes that its header says")
    return body
