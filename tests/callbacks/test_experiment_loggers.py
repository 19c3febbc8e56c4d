"""Weights & Biases and MLflow: without them, what to install; with them, the values in their own files."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.helpers import small_trainer
from tests.trainer.helpers import class_batches
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.mlflow_logger import MLflowLogger
from xlatrainer.callbacks.wandb_logger import WandbLogger


@pytest.mark.parametrize(
    ("logger", "module"), [(WandbLogger, "wandb"), (MLflowLogger, "mlflow")], ids=["wandb", "mlflow"]
)
def test_what_is_not_installed_is_said(logger: type[Callback], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{logger.__name__} needs the package '{module}'.*: pip install {module}"):
        logger()


def fail(epoch: int, logs: Any) -> None:
    if epoch == 1:
        raise OSError("no space left")


@pytest.mark.parametrize("fails", [False, True])
def test_mlflow(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = tmp_path.as_uri()
    logger = MLflowLogger("digits", "first", uri, params={"width": 16}, update_freq=2)
    callbacks = [logger, LambdaCallback(on_epoch_end=fail)] if fails else [logger]
    fit: Any = {"x": class_batches(rows=64), "epochs": 2, "callbacks": callbacks, "verbose": 0}
    trainer = small_trainer()
    if fails:
        with pytest.raises(OSError, match="no space left"):
            trainer.fit(**fit)
    else:
        history = trainer.fit(**fit)
    client = mlflow.MlflowClient(uri)
    run = client.get_run(logger.run_id)
    assert run.info.status == ("FAILED" if fails else "FINISHED")
    assert run.info.run_name == "first"
    assert run.data.params == {"width": "16"}
    losses = client.get_metric_history(logger.run_id, "loss")
    assert [metric.step for metric in losses] == [0, 1]
    assert fails or [metric.value for metric in losses] == history.history["loss"]
    assert [metric.step for metric in client.get_metric_history(logger.run_id, "batch/loss")] == [2, 4, 6, 8]


@pytest.fixture
def wandb() -> Iterator[Any]:
    module = pytest.importorskip("wandb")
    yield module
    module.teardown()


def test_wandb_offline(tmp_path: Path, wandb: Any) -> None:
    fit: Any = {"x": class_batches(rows=64), "epochs": 2, "verbose": 0}
    settings: Any = {"mode": "offline", "dir": str(tmp_path)}
    run = wandb.init(config={"width": 16}, **settings)
    logger = WandbLogger(update_freq=2)
    history = small_trainer().fit(**fit, callbacks=[logger])
    assert logger.run is run is wandb.run
    assert (run.summary["loss"], run.summary["epoch"]) == (history.history["loss"][-1], 1)
    assert run.summary["batch/loss"] > 0
    run.finish()
    own = WandbLogger("digits", "first", {"width": 16}, **settings)
    small_trainer().fit(**fit, callbacks=[own])
    assert wandb.run is None
    assert own.run.config["width"] == 16
    assert len(list(tmp_path.rglob("*.wandb"))) == 2
