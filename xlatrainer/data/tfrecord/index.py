"""Where the records of TFRecord files begin: found once, and kept beside each file.

The index of `data.tfrecord` is `data.tfrecord.xlaindex`: a line of JSON with the format, the size and time of the file
it belongs to and the number of records, then the offsets as int64, little-endian, then the CRC-32C of all that. One
that is damaged or belongs to another version of the file is made anew.
"""

from __future__ import annotations

import json
import struct
import warnings

import numpy as np

from xlatrainer.data.tfrecord.framing import Source, crc_function, offsets
from xlatrainer.storage import files
from xlatrainer.storage.files import Entry

__all__ = ["INDEX_ENDING", "index_of"]

_FORMAT = 1
INDEX_ENDING = ".xlaindex"


def index_of(path: str, store: bool) -> np.ndarray:
    """The offsets of the records of an uncompressed file, and its size at the end: int64, of shape (records + 1,).

    Args:
        path: A local path or URL.
        store: Whether the index is read from beside the file, and written there. Where that is not allowed there is a
            warning, and the index is in memory alone.

    Raises:
        RecordError: If a length in the file is damaged, or the file is cut short.
    """
    entry = files.stat(path)
    if store and (found := _stored(path, entry)) is not None:
        return found
    with Source(path) as source:
        found = np.array(offsets(source), np.int64)
    if store:
        about = {"format": _FORMAT, "size": entry.size, "mtime": entry.mtime, "records": len(found) - 1}
        content = json.dumps(about).encode() + b"\n" + found.astype("<i8").tobytes()
        try:
            files.write(path + INDEX_ENDING, content + struct.pack("<I", crc_function()(content)), flush=False)
        except PermissionError as error:
            warnings.warn(
                f"the index of {path} cannot be stored beside it ({error}); it is made anew each time: "
                f"index='memory' says that this is meant",
                stacklevel=2,
            )
    return found


def _stored(path: str, entry: Entry) -> np.ndarray | None:
    try:
        content = files.read(path + INDEX_ENDING)
    except (FileNotFoundError, PermissionError):
        return None
    line, newline, rest = content.partition(b"\n")
    body, checksum = content[:-4], content[-4:]
    if not newline or len(checksum) != 4 or struct.unpack("<I", checksum)[0] != crc_function()(body):
        return None
    about = json.loads(line)
    current = (about["format"], about["size"], about["mtime"]) == (_FORMAT, entry.size, entry.mtime)
    return np.frombuffer(rest[:-4], "<i8").astype(np.int64) if current else None
