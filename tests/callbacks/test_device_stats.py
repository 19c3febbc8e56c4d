"""What the device did in an epoch is in its logs, and looking at it does nothing more."""

import time
from collections.abc import Iterator
from typing import Any

from tests.callbacks.helpers import counts, since, small_trainer
from tests.trainer.helpers import class_batches
from xlatrainer.backend.host_memory import give_back_freed_memory
from xlatrainer.backend.memory import memory_in_use
from xlatrainer.callbacks.device_stats import DeviceStats


class Slow:
    """Batches that take their time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[Any]:
        for batch in class_batches(rows=64):
            time.sleep(self.seconds)
            yield batch


def test_the_counts_of_each_epoch() -> None:
    trainer = small_trainer("xla")
    trainer.fit(class_batches(rows=16), verbose=0)
    before = counts()
    history = trainer.fit(Slow(0.02), epochs=2, callbacks=[DeviceStats()], verbose=0).history
    assert since(before) == {"Execute": 8, "UncachedCompile": 0, "TransferFromDevice": 2, "Replay": 7}
    assert history["executions"] == [4, 4]
    assert history["compiles"] == [0, 0]
    assert history["cpu_fallbacks"] == [0, 0]
    assert all(0.08 <= waited < 30 for waited in history["input_wait"])
    assert all(0 < speed < 1 / 0.02 for speed in history["steps_per_second"])
    assert all(value > 1e7 for value in history["memory_bytes"])


def test_memory_grows_with_what_is_kept() -> None:
    give_back_freed_memory()  # what tests before this one have freed would be used again
    before = memory_in_use()
    kept = bytearray(200_000_000)
    assert memory_in_use() - before > 100_000_000
    del kept
