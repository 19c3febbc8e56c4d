"""`WandbLogger`: the logs in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xlatrainer.callbacks.batch_values import BatchValues
from xlatrainer.callbacks.callback import Callback, LogValues
from xlatrainer.optional import require

__all__ = ["WandbLogger"]


class WandbLogger(Callback):
    """Logs the values of epochs, and of batches if wished, to a run of Weights & Biases.

    A run that the program has begun with `wandb.init` is used and left open; otherwise one is begun with the `fit` and
    finished with it, as failed after an exception. Values of epochs are "loss", "val_loss" and so on, beside "epoch",
    those of batches "batch/loss"; the step is `trainer.step`.

    Args:
        project, name, config: As for `wandb.init`; default None.
        update_freq: "epoch" (default), "batch", or a number of steps from one writing of batches' values to the next.
        **init: Further arguments of `wandb.init`, such as `mode="offline"` or `dir`.

    Raises:
        ImportError: If `wandb` is not installed.
    """

    writes_files = True
    on_every_process = False

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        update_freq: str | int = "epoch",
        **init: Any,
    ) -> None:
        self._wandb = require("wandb", "WandbLogger", "pip install wandb")
        self._init = {"project": project, "name": name, "config": None if config is None else dict(config), **init}
        self._batches = BatchValues(update_freq)
        self._failed = False
        self.run: Any = None

    def on_train_begin(self, logs: LogValues) -> None:
        self._failed = False
        self._batches.begin(self.trainer.step)
        self._is_own = self._wandb.run is None
        self.run = self._wandb.init(**self._init) if self._is_own else self._wandb.run

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        self._batches.add(self.trainer.step, logs)
        self._log_batches(wait=False)

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        self._log_batches(wait=True)
        self.run.log({"epoch": epoch, **logs}, step=self.trainer.step, commit=True)

    def on_exception(self, error: BaseException) -> None:
        self._failed = True

    def on_train_end(self, logs: LogValues) -> None:
        self._log_batches(wait=True)
        if self._is_own:
            self.run.finish(exit_code=int(self._failed))

    def _log_batches(self, wait: bool) -> None:
        for step, _, logs in self._batches.take(wait):
            self.run.log({f"batch/{name}": value for name, value in logs.items()}, step=step)
