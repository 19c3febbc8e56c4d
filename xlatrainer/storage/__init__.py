"""Files on this machine and behind every URL that fsspec knows, by the same few functions.

    systems      which file system a path or URL names; retries, and errors that say what is wrong
    files        read, write, list, stat, remove, open
    publishing   files that appear whole or not at all

Owns no format: what is in the files is the business of those that call. `xlatrainer.data.gcsfs` has the names of
PyTorch/XLA for it.
"""

from xlatrainer.storage.files import (
    Entry,
    exists,
    join,
    list_folder,
    make_folder,
    open_file,
    read,
    remove,
    remove_tree,
    stat,
    write,
)
from xlatrainer.storage.publishing import publish_file

__all__ = [
    "Entry",
    "exists",
    "join",
    "list_folder",
    "make_folder",
    "open_file",
    "publish_file",
    "read",
    "remove",
    "remove_tree",
    "stat",
    "write",
]
