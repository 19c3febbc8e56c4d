"""The exceptions of xlatrainer that a caller may want to catch.

    RuntimeError
    ├── LoweringError        an operator could not be turned into XLA; names the operator and the user's line
    ├── CompileError         XLA refused the program; lists what was recorded last
    ├── ExecutionError       a compiled program failed while it ran
    ├── LostValueError       a tensor whose program failed was read
    ├── GraphBreakError      a function compiled with full_graph=True would end its graph early
    ├── GraphLimitError      a compiled function came to more graphs than it was allowed
    ├── ForkedProcessError   the device was touched in a forked child
    ├── CachedSampleError    a sample of a cached dataset is missing or damaged, and cannot be made anew
    ├── CacheError           a file of the cache of compiled programs cannot be used
    ├── RecordError          a TFRecord file is damaged or is none, or a record is no Example
    └── CheckpointError      a checkpoint is damaged, or could not be written

Wrong arguments raise `ValueError` and `TypeError`, and operators raise what CPU torch raises.
"""

__all__ = [
    "CacheError",
    "CachedSampleError",
    "CheckpointError",
    "CompileError",
    "ExecutionError",
    "ForkedProcessError",
    "GraphBreakError",
    "GraphLimitError",
    "LostValueError",
    "LoweringError",
    "RecordError",
]


class LoweringError(RuntimeError):
    """An operator has a lowering, but it failed for these arguments."""


class CompileError(RuntimeError):
    """XLA could not compile the recorded program."""


class ExecutionError(RuntimeError):
    """A compiled program failed while it ran (out of memory, a failing device)."""


class LostValueError(RuntimeError):
    """The program that should have computed this tensor failed; its value does not exist."""


class GraphBreakError(RuntimeError):
    """Something in a function that was compiled with `full_graph=True` ends the graph before the function."""


class GraphLimitError(RuntimeError):
    """A compiled function came to more different graphs than `num_different_graphs_allowed`."""


class ForkedProcessError(RuntimeError):
    """The `xla` device of a parent process was used in a forked child."""


class CacheError(RuntimeError):
    """A file of the cache of compiled programs is damaged. Never seen by a user: the program is compiled anew."""


class CachedSampleError(RuntimeError):
    """A sample of a `CachedDataset` is missing or damaged, and there is no dataset to make it anew; names the file."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or could not be written; the message names the file and says what is left."""


class RecordError(RuntimeError):
    """A TFRecord file is damaged, cut short, or none at all; or a record in it is no Example.

    The message names the file, the record and the byte.

    Attributes:
        path: The file; None where it is not known.
        record: The number of the record in the file, from 0; None where it is not known.
        offset: The byte at which the record starts, in the decompressed contents; None where it is not known.
    """

    def __init__(
        self, message: str, path: str | None = None, record: int | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.record = record
        self.offset = offset


class ProcessesError(RuntimeError):
    """The processes of one computation did not find each other, or one of them has failed."""
