"""`BackupAndRestore`: a training that is started again goes on where it was."""

from __future__ import annotations

import math
import os
from datetime import timedelta

from xlatrainer.callbacks.callback import Callback, LogValues
from xlatrainer.callbacks.frequency import Frequency

__all__ = ["BackupAndRestore"]


class BackupAndRestore(Callback):
    """Saves the whole state as it trains; the next `fit` with the same backup goes on from there, bit for bit.

    For programs that may be killed and are then simply started again: `fit` needs no `resume_from`. Pass the same data
    and arguments. The backup is one checkpoint, replaced as a whole, and deleted when the training has come to its end.
    From a loss on that is not finite it is neither replaced nor deleted.

    Args:
        backup_dir: A folder or a URL that fsspec knows, for this training alone; the checkpoint is `backup` in it.
        save_freq: "epoch" (default); a number of steps, or "500 steps"; or a time, such as "10 minutes".
        delete_checkpoint: Whether the backup of a training that has ended is deleted; default True. One that is kept
            makes the next `fit` train nothing but further epochs.

    Attributes:
        path: Of the checkpoint.
    """

    runs_last = True
    writes_files = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int | timedelta = "epoch",
        delete_checkpoint: bool = True,
    ) -> None:
        self.path = f"{os.fspath(backup_dir).rstrip('/')}/backup"
        self.frequency = Frequency(save_freq)
        self.delete_checkpoint = delete_checkpoint
        self._failed = False
        self._has_saved = False

    def resume_from(self) -> str:
        return self.path

    def on_train_begin(self, logs: LogValues) -> None:
        self._failed = False
        self._has_saved = self.trainer.saver.resumed_from == self.path
        self.frequency.refuse_time(self.trainer.strategy.process[1])
        self.frequency.begin(self.trainer.step)

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        if not self.frequency.is_epoch and self.frequency.is_due(self.trainer.step):
            self._save(logs)

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        if self.frequency.is_epoch:
            self._save(logs)

    def on_exception(self, error: BaseException) -> None:
        self._failed = True

    def on_train_end(self, logs: LogValues) -> None:
        if self._failed:
            return
        if not self.trainer.stop_training and self.trainer.epoch < self.params["epochs"]:
            self._save(logs)  # it was interrupted
        elif self.delete_checkpoint and self._has_saved and _is_sound(logs):
            self.trainer.saver.remove(self.path)

    def _save(self, logs: LogValues) -> None:
        if _is_sound(logs):
            self.trainer.save(self.path)
            self._has_saved = True


def _is_sound(logs: LogValues) -> bool:
    return "loss" not in logs or math.isfinite(logs["loss"])
