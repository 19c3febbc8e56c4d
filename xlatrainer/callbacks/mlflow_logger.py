"""`MLflowLogger`: the logs in an MLflow experiment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from xlatrainer.callbacks.batch_values import BatchValues
from xlatrainer.callbacks.callback import Callback, LogValues
from xlatrainer.optional import require

__all__ = ["MLflowLogger"]


class MLflowLogger(Callback):
    """Logs the values of epochs, and of batches if wished, to a new run of an MLflow experiment for each `fit`.

    Values of epochs are "loss", "val_loss" and so on, at the epoch's number counted from 0; those of batches
    "batch/loss", at `trainer.step`. The run ends as finished, or as failed after an exception.

    Args:
        experiment_name: Made if it does not exist; default "Default", MLflow's own.
        run_name: Default None, a name that MLflow makes up.
        tracking_uri: Where to; default None, what MLflow is set to.
        params: Parameters of the run; default none.
        update_freq: "epoch" (default), "batch", or a number of steps from one writing of batches' values to the next.

    Attributes:
        run_id: Of the latest run; None before.

    Raises:
        ImportError: If `mlflow` is not installed.
    """

    writes_files = True
    on_every_process = False

    def __init__(
        self,
        experiment_name: str = "Default",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, Any] | None = None,
        update_freq: str | int = "epoch",
    ) -> None:
        self._mlflow = require("mlflow", "MLflowLogger", "pip install mlflow")
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self._run_params = dict(params or {})
        self._batches = BatchValues(update_freq)
        self._failed = False
        self.run_id: str | None = None

    def on_train_begin(self, logs: LogValues) -> None:
        self._failed = False
        self._batches.begin(self.trainer.step)
        self._client = self._mlflow.MlflowClient(self.tracking_uri)
        experiment = self._client.get_experiment_by_name(self.experiment_name)
        known = experiment.experiment_id if experiment else self._client.create_experiment(self.experiment_name)
        self.run_id = self._client.create_run(known, run_name=self.run_name).info.run_id
        for name, value in self._run_params.items():
            self._client.log_param(self.run_id, name, value)

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        self._batches.add(self.trainer.step, logs)
        self._log_batches(wait=False)

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        self._log_batches(wait=True)
        self._log(dict(logs), epoch, time.time())

    def on_exception(self, error: BaseException) -> None:
        self._failed = True

    def on_train_end(self, logs: LogValues) -> None:
        self._log_batches(wait=True)
        self._client.set_terminated(self.run_id, "FAILED" if self._failed else "FINISHED")

    def _log_batches(self, wait: bool) -> None:
        for step, seconds, logs in self._batches.take(wait):
            self._log({f"batch/{name}": value for name, value in logs.items()}, step, seconds)

    def _log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        metrics = [
            self._mlflow.entities.Metric(name, value, int(seconds * 1000), step) for name, value in values.items()
        ]
        self._client.log_batch(self.run_id, metrics=metrics)
