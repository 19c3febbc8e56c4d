"""`ProgbarLogger`: a progress bar in a terminal or a notebook, or one line an epoch.

Owns how values are shown. It never makes the device wait while batches run: the bar shows the newest values that
happen to be ready, and only the end of an epoch reads values that may not be.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from tqdm.auto import tqdm
from tqdm.notebook import tqdm_notebook

from xlatrainer.backend import counters
from xlatrainer.callbacks.callback import Callback, LogValues, MaybeReady

__all__ = ["ProgbarLogger", "ProgressBar", "resolve_verbose"]

_SECONDS_BETWEEN_REFRESHES = 0.25
_LOGS_KEPT = 32
_IN_NOTEBOOK = issubclass(tqdm, tqdm_notebook)


def resolve_verbose(verbose: str | int) -> int:
    """0 (silent), 1 (bar) or 2 (one line an epoch) for the `verbose` a user gave.

    Args:
        verbose: 0, 1, 2, or "auto": 1 if stdout is a terminal or in a notebook, otherwise 2.

    Raises:
        ValueError: For anything else.
    """
    if verbose == "auto":
        return 1 if sys.stdout.isatty() or _IN_NOTEBOOK else 2
    if verbose in (0, 1, 2):
        return int(verbose)
    raise ValueError(f'verbose must be "auto", 0 (silent), 1 (progress bar) or 2 (one line an epoch), not {verbose!r}')


class ProgbarLogger(Callback):
    """Shows loss, metrics, the time of a step and examples a second; the Trainer adds one unless `verbose` is 0.

    With `verbose=1` a bar with the time that is left, redrawn at most four times a second; with `verbose=2` a line at
    the end of each epoch and of each `evaluate`. The bar says "compiling" during the first step of a `fit`, and the
    epochs in which programs were compiled say how many.
    """

    on_every_process = False

    def __init__(self) -> None:
        self._bar: _Bar | None = None
        self._in_fit = False
        self._title = ""
        self._suffix = ""

    def on_train_begin(self, logs: LogValues) -> None:
        self._in_fit = True
        self._is_first = True

    def on_train_end(self, logs: LogValues) -> None:
        self._in_fit = False

    def on_epoch_begin(self, epoch: int, logs: LogValues) -> None:
        self._title = f"Epoch {epoch + 1}/{self.params['epochs']}"
        self._examples_before = self.trainer.num_examples
        self._suffix = ""
        self._begin()

    def on_train_batch_begin(self, batch: int, logs: LogValues) -> None:
        if self._is_first and self._bar is not None:
            self._bar.draw(0, "compiling")
        self._is_first = False

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        self._show(batch, logs, self.trainer.num_examples - self._examples_before)

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        self._finish_training()
        self._end(logs, self._suffix)

    def on_test_begin(self, logs: LogValues) -> None:
        if self._in_fit:
            self._finish_training()
        else:
            self._title = "Evaluate"
            self._begin()

    def on_test_batch_end(self, batch: int, logs: LogValues) -> None:
        if not self._in_fit:
            self._show(batch, logs)

    def on_test_end(self, logs: LogValues) -> None:
        if not self._in_fit:
            self._end(logs)

    def on_predict_begin(self, logs: LogValues) -> None:
        self._title = "Predict"
        self._begin()

    def on_predict_batch_end(self, batch: int, logs: LogValues) -> None:
        self._show(batch, logs)

    def on_predict_end(self, logs: LogValues) -> None:
        self._end(logs)

    def on_exception(self, error: BaseException) -> None:
        self._close()

    def _begin(self) -> None:
        self._compiled_before = counters.value("UncachedCompile")
        self._start = self._last_refresh = time.perf_counter()
        self._recent: deque[LogValues] = deque(maxlen=_LOGS_KEPT)
        self._shown: LogValues = {}
        self._batches = 0
        if self.params["verbose"] == 1:
            self._bar = _Bar(self._title, self.params["steps"])

    def _show(self, batch: int, logs: LogValues, num_examples: int = 0) -> None:
        """Note the logs of a batch, and redraw the bar if it is time to."""
        self._recent.append(logs)
        self._batches = batch + 1
        now = time.perf_counter()
        if self._bar is None or now - self._last_refresh < _SECONDS_BETWEEN_REFRESHES:
            return
        self._last_refresh = now
        self._shown = self._newest_ready() or self._shown
        self._bar.draw(self._batches, _values_text(self._shown, self._rate_text(num_examples, now - self._start)))

    def _newest_ready(self) -> LogValues | None:
        for logs in reversed(self._recent):
            if not isinstance(logs, MaybeReady) or logs.is_ready:
                return logs
        return None

    def _finish_training(self) -> None:
        """The training batches of an epoch are over: wait for the last one, then the clock has the whole epoch."""
        if self._suffix or not self._recent:
            return
        values = dict(self._recent[-1])
        num_examples = self.trainer.num_examples - self._examples_before
        self._suffix = self._rate_text(num_examples, time.perf_counter() - self._start)
        if self._bar is not None:
            self._bar.draw(self._batches, _values_text(values, self._suffix))

    def _end(self, logs: LogValues, suffix: str = "") -> None:
        text = _values_text(logs, suffix)
        seconds = time.perf_counter() - self._start
        self._recent.clear()
        if self._bar is not None:
            self._bar.draw(self._batches, text)
            self._close()
        else:
            print(" - ".join(part for part in (self._title, f"{seconds:.1f}s", text) if part), flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _rate_text(self, num_examples: int, seconds: float) -> str:
        """The time of a step, examples a second, and how many programs were compiled, if any."""
        if not (num_examples and self._batches and seconds > 0):
            return ""
        compiled = counters.value("UncachedCompile") - self._compiled_before
        parts = [f"{_time_text(seconds / self._batches)}/step", f"{num_examples / seconds:,.0f} examples/s"]
        return " - ".join([*parts, f"{compiled} compiled"] if compiled else parts)


ProgressBar = ProgbarLogger


class _Bar:
    """A tqdm bar whose count is set rather than advanced."""

    def __init__(self, title: str, total: int | None) -> None:
        count = "{n_fmt}/{total_fmt}" if total else "{n_fmt}"
        width = "" if _IN_NOTEBOOK else ":20"
        bar = "{desc}: {percentage:3.0f}%|{bar" + width + "}| " if total else "{desc}: "
        times = "{elapsed}<{remaining}" if total else "{elapsed}"
        self._tqdm: Any = _QuietTqdm(
            total=total,
            desc=title,
            file=sys.stdout,
            dynamic_ncols=True,
            mininterval=0,
            bar_format=f"{bar}{count} [{times}{{postfix}}]",
        )

    def draw(self, count: int, text: str) -> None:
        self._tqdm.n = count
        self._tqdm.set_postfix_str(text, refresh=True)

    def close(self) -> None:
        self._tqdm.close()


class _QuietTqdm(tqdm):  # type: ignore[misc]  # tqdm has no types
    monitor_interval = 0  # tqdm's watching thread is of no use to a bar that is redrawn by hand


def _values_text(logs: LogValues, suffix: str) -> str:
    texts = [f"{name}: {value:.4g}" if value else f"{name}: 0" for name, value in logs.items()]
    return " - ".join([*texts, suffix] if suffix else texts)


def _time_text(seconds: float) -> str:
    """Three digits or so, with a unit.

    Example:
        >>> _time_text(0.0123), _time_text(1.5)
        ('12.3ms', '1.5s')
    """
    return f"{seconds:.3g}s" if seconds >= 1 else f"{seconds * 1000:.3g}ms"
