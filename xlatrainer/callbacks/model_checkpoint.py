"""`ModelCheckpoint`: save while training, and keep the files that count."""

from __future__ import annotations

import contextlib
import math
import os
import string
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from xlatrainer.callbacks.callback import LogValues
from xlatrainer.callbacks.frequency import Frequency
from xlatrainer.callbacks.monitor import Mode, Monitor
from xlatrainer.callbacks.per_fit import PerFitCallback

__all__ = ["ModelCheckpoint"]


@dataclass(frozen=True)
class _Written:
    path: str
    value: float | None
    is_sound: bool


class ModelCheckpoint(PerFitCallback):
    """Saves the Trainer's state, or the weights alone, every epoch, every so many steps or every so often.

    It is called after the other callbacks, whose state is in the file. What an earlier run wrote is never deleted, nor
    is the newest file from before a loss that is not finite.

    Args:
        filepath: Where, as for `trainer.save`: a folder or a URL that fsspec knows. Names in braces are filled in:
            `{epoch}` (counted from 1), `{step}` (updates made), `{batch}` (counted from 1, when saving by steps or
            time) and any name of the logs, with a format if wished: "runs/{epoch:02d}-{val_loss:.3f}". Folders are made
            if need be. A path without names is overwritten.
        monitor: The name that tells which is best; default "val_loss". It is read only with `save_best_only` or
            `save_top_k`; a name that is not there is dealt with as in `EarlyStopping`.
        verbose: 1 prints each path; default 0.
        save_best_only: True saves only what is better than all before; default False.
        save_weights_only: True saves with `trainer.save_weights`; default False, with `trainer.save`.
        mode: "min", "max" or "auto" (default), which tells by the name.
        save_freq: "epoch" (default); a number of steps, or "500 steps"; or a time, such as "10 minutes".
        initial_value_threshold: With `save_best_only`, the value that the first one must be better than.
        max_to_keep: How many of the latest files to keep; default None, all. `keep_last` is another name.
        save_top_k: How many of the best files to keep; a value that is not among them is not saved, unless
            `max_to_keep` is given too. Default None. `keep_best` is another name.
        async_save: Write in the background, see `trainer.save`; files go when the one that replaces them is there.
            Default False.

    Attributes:
        best: The best value so far.
        last_path, best_path: What was saved last, and with the best value; None before.
    """

    runs_last = True
    writes_files = True

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: Mode = "auto",
        save_freq: str | int | timedelta = "epoch",
        initial_value_threshold: float | None = None,
        *,
        max_to_keep: int | None = None,
        save_top_k: int | None = None,
        keep_last: int | None = None,
        keep_best: int | None = None,
        async_save: bool = False,
    ) -> None:
        self.filepath = os.fspath(filepath)
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.async_save = async_save
        if async_save and save_weights_only:
            raise ValueError(
                "async_save is for whole checkpoints; with save_weights_only the weights are written at once"
            )
        self.frequency = Frequency(save_freq)
        self.initial_value_threshold = initial_value_threshold
        self.max_to_keep = _number("max_to_keep", max_to_keep, "keep_last", keep_last)
        self.save_top_k = _number("save_top_k", save_top_k, "keep_best", keep_best)
        compares = save_best_only or self.save_top_k is not None
        self.monitor = Monitor(monitor, mode, owner="ModelCheckpoint") if compares else None
        self._fields = {name for _, name, _, _ in string.Formatter().parse(self.filepath) if name is not None}
        if len(self._fields) == 0 and (self.save_top_k or 1, self.max_to_keep or 1) != (1, 1):
            raise ValueError(f"{self.filepath!r} is one file; to keep several, name them by {{epoch}} or {{step}}")
        self.reset()

    def reset(self) -> None:
        self.best: float | None = self.initial_value_threshold
        self.last_path: str | None = None
        self.best_path: str | None = None
        self._written: list[_Written] = []

    def on_train_begin(self, logs: LogValues) -> None:
        super().on_train_begin(logs)
        self.frequency.refuse_time(self.trainer.strategy.process[1])
        self.frequency.begin(self.trainer.step)
        self._epoch = 0
        if self.monitor is not None:
            self.monitor.begin()

    def on_epoch_begin(self, epoch: int, logs: LogValues) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        if not self.frequency.is_epoch and self.frequency.is_due(self.trainer.step):
            self._consider(logs, batch)

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        if self.frequency.is_epoch:
            self._consider(logs, None)

    def on_train_end(self, logs: LogValues) -> None:
        super().on_train_end(logs)
        self._delete_the_rest()
        if self.monitor is not None:
            self.monitor.end()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("best", "last_path", "best_path")}

    def _consider(self, logs: LogValues, batch: int | None) -> None:
        value = None
        is_best = False
        if self.monitor is not None:
            value = self.monitor.read(logs)
            if value is None:
                return
            is_best = self.monitor.is_better(value, than=self.monitor.worst if self.best is None else self.best)
            if self.save_best_only and not is_best:
                return
            if self.save_top_k is not None and self.max_to_keep is None and not self._is_among_best(value):
                return
        path = self._path(logs, batch)
        if is_best:
            self.best, self.best_path = value, path
        self.last_path = path
        if self.async_save:
            self._delete_the_rest()  # of what is complete by now
        self._save(path)
        self._written = [written for written in self._written if written.path != path] + [
            _Written(path, value, "loss" not in logs or math.isfinite(logs["loss"]))
        ]
        if not self.async_save:
            self._delete_the_rest()

    def _save(self, path: str) -> None:
        if self.save_weights_only:
            self.trainer.save_weights(path)
        else:
            self.trainer.save(path, async_save=self.async_save)
        if self.verbose:
            print(f"Epoch {self._epoch + 1}: saved {path}")

    def _path(self, logs: LogValues, batch: int | None) -> str:
        known: dict[str, float] = {"epoch": self._epoch + 1, "step": self.trainer.step}
        if batch is not None:
            known["batch"] = batch + 1
        missing = sorted(self._fields - set(known) - set(logs))
        if missing:
            raise ValueError(f"the file name {self.filepath!r} needs {missing}; there are {sorted({*known, *logs})}")
        known.update((name, logs[name]) for name in self._fields & set(logs))
        return self.filepath.format(**known)

    def _is_among_best(self, value: float) -> bool:
        assert self.monitor is not None
        assert self.save_top_k is not None
        if value != value:
            return False
        kept = [written.value for written in self._written if written.value is not None]
        better = sum(not self.monitor.is_better(value, than=other) for other in kept)
        return better < self.save_top_k

    def _delete_the_rest(self) -> None:
        if self.max_to_keep is None and self.save_top_k is None:
            return
        keep = self._written[-self.max_to_keep :] if self.max_to_keep is not None else []
        if self.monitor is not None and self.save_top_k is not None:
            sign = -1 if self.monitor.higher_is_better else 1
            comparable = [one for one in self._written if one.value is not None and one.value == one.value]
            keep = keep + sorted(comparable, key=lambda one: sign * (one.value or 0.0))[: self.save_top_k]
        sound = [one for one in self._written if one.is_sound]
        keep = keep + sound[-1:]
        self.trainer.wait_for_saves()
        for written in self._written:
            if written not in keep:
                self._delete(written.path)
        self._written = [written for written in self._written if written in keep]

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody else has deleted it
            self.trainer.saver.remove(path)


def _number(name: str, value: int | None, other_name: str, other: int | None) -> int | None:
    if value is not None and other is not None:
        raise ValueError(f"{name} and {other_name} are two names of the same; give one of them")
    number = other if value is None else value
    if number is not None and number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number
