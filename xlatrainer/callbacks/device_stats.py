"""`DeviceStats`: what the device did in each epoch, in the logs."""

from __future__ import annotations

import time

from xlatrainer.backend import counters
from xlatrainer.backend.memory import memory_in_use
from xlatrainer.callbacks.callback import Callback, LogValues

__all__ = ["DeviceStats"]

_COUNTERS = {"compiles": "UncachedCompile", "executions": "Execute", "transfers_to_host": "TransferFromDevice"}


class DeviceStats(Callback):
    """Adds to the logs of each epoch what the device did in it, for the callbacks after it and the `History`.

    - "memory_bytes": the memory that is in use when the epoch ends: the device's, or the process's where XLA runs on
      the CPU.
    - "compiles", "executions", "transfers_to_host": programs compiled and run, and tensors read.
    - "cpu_fallbacks": operators that ran on the CPU for want of a lowering.
    - "input_wait": seconds in which the training waited for its next batch, or for callbacks between two batches.
    - "steps_per_second": updates a second, validation left out.

    Nothing is read from the device.

    Example:
        >>> from xlatrainer.callbacks import JSONLogger
        >>> callbacks = [DeviceStats(), JSONLogger("log.jsonl")]
    """

    def on_epoch_begin(self, epoch: int, logs: LogValues) -> None:
        self._before = counters.snapshot()
        self._step = self.trainer.step
        self._began = self._idle_since = self._trained_until = time.monotonic()
        self._input_wait = 0.0

    def on_train_batch_begin(self, batch: int, logs: LogValues) -> None:
        self._input_wait += time.monotonic() - self._idle_since

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        self._idle_since = self._trained_until = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        now = counters.snapshot()
        new = {name: count - self._before.get(name, 0) for name, count in now.items()}
        seconds = self._trained_until - self._began
        logs["memory_bytes"] = float(memory_in_use())
        for name, counter in _COUNTERS.items():
            logs[name] = float(new.get(counter, 0))
        logs["cpu_fallbacks"] = float(sum(count for name, count in new.items() if name.startswith("aten::")))
        logs["input_wait"] = self._input_wait
        logs["steps_per_second"] = (self.trainer.step - self._step) / seconds if seconds > 0 else 0.0
