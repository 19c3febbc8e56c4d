"""`Profiler`: a trace of a few training steps, to be looked at in TensorBoard or Perfetto."""

from __future__ import annotations

import os
import time
from pathlib import Path

from xlatrainer.backend.device import wait_device_ops
from xlatrainer.callbacks.callback import Callback, LogValues
from xlatrainer.profiler import start_trace, stop_trace
from xlatrainer.storage.mirror import Mirror

__all__ = ["Profiler", "StepTrace"]


class StepTrace:
    """A trace by jax's profiler of the steps from `first` to `last`, counted by `trainer.step` from 1.

    It is written to `log_dir`, a path or URL, or a `Mirror` whose files another sends.

    Raises:
        ValueError: If the range is empty.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | Mirror, first: int, last: int) -> None:
        if not 1 <= first <= last:
            raise ValueError(f"the steps to profile are (first, last) with 1 <= first <= last, got {(first, last)}")
        self._mirror = log_dir if isinstance(log_dir, Mirror) else Mirror(log_dir)
        self._is_own = self._mirror is not log_dir
        self.first = first
        self.last = last
        self.path: Path | str | None = None
        self._is_running = False
        self._is_done = False

    def before_step(self, step: int) -> None:
        """The step number `step` begins."""
        if step >= self.first and not self._is_running and not self._is_done:
            wait_device_ops()  # what is before them is not theirs
            self._mirror.folder.mkdir(parents=True, exist_ok=True)
            self._began = time.time()
            start_trace(self._mirror.folder)
            self._is_running = True

    def after_step(self, step: int) -> None:
        """The step number `step` has been started."""
        if self._is_running and step >= self.last:
            self.stop()

    def stop(self) -> None:
        """Write the trace, if one is running.

        Raises:
            RuntimeError: If jax's profiler has written no file.
        """
        if not self._is_running:
            return
        self._is_running, self._is_done = False, True
        stop_trace()
        folder = self._mirror.folder
        files = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        if not files or files[-1].stat().st_mtime < self._began - 1:
            raise RuntimeError(f"jax's profiler was stopped, but there is no new *.xplane.pb below {folder}")
        shown = self._mirror.shown(files[-1])
        self.path = shown if "://" in shown else Path(shown)
        if self._is_own:
            self._mirror.close()
        print(f"Profile of the steps {self.first} to {self.last}: {self.path}")


class Profiler(Callback):
    """Traces some training steps with jax's profiler, checks that the trace is there, and prints its path.

    `tensorboard --logdir LOG_DIR` shows it with the plugin of the package `xprof`.

    Args:
        steps: The first and the last step, counted by `trainer.step` from 1 on; default (10, 20), after the steps that
            compile. A training that ends earlier ends the trace.
        log_dir: The folder or a URL that fsspec knows; default "logs".

    Attributes:
        path: The trace file, a Path or for a URL a string; None before it is written.

    Example:
        >>> Profiler(steps=(5, 8)).trace.last
        8
    """

    writes_files = True

    def __init__(self, steps: tuple[int, int] = (10, 20), log_dir: str | os.PathLike[str] = "logs") -> None:
        self.steps = steps
        self.log_dir = log_dir
        self.trace = StepTrace(log_dir, *steps)

    @property
    def path(self) -> Path | str | None:
        return self.trace.path

    def on_train_begin(self, logs: LogValues) -> None:
        self.trace = StepTrace(self.log_dir, *self.steps)

    def on_train_batch_begin(self, batch: int, logs: LogValues) -> None:
        self.trace.before_step(self.trainer.step + 1)

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        self.trace.after_step(self.trainer.step)

    def on_train_end(self, logs: LogValues) -> None:
        self.trace.stop()
