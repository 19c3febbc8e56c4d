"""A line an epoch, on disk when the epoch ends."""

import csv
from pathlib import Path

from tests.trainer.helpers import ON_CPU, class_batches, classifier
from xlatrainer.callbacks.csv_logger import CSVLogger
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.trainer.trainer import Trainer


def rows(path: Path, separator: str = ",") -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=separator))


def begun(logger: CSVLogger) -> CSVLogger:
    logger.set_trainer(Trainer(classifier(), "sgd", strategy=ON_CPU))
    logger.on_train_begin({})
    return logger


def test_the_values_of_the_history(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.csv"
    sizes: list[int] = []
    trainer = Trainer(classifier(), "sgd", metrics=["accuracy"], strategy=ON_CPU)
    look = LambdaCallback(on_epoch_end=lambda epoch, logs: sizes.append(len(rows(path))))
    history = trainer.fit(
        class_batches(), epochs=2, validation_data=class_batches(), callbacks=[CSVLogger(path), look], verbose=0
    )
    assert sizes == [1, 2]
    assert list(rows(path)[0]) == ["epoch", "loss", "accuracy", "val_loss", "val_accuracy"]
    assert [int(row["epoch"]) for row in rows(path)] == [0, 1]
    assert [float(row["val_loss"]) for row in rows(path)] == history.history["val_loss"]


def test_append_and_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for append, expected in ((False, 1), (True, 2), (True, 3), (False, 1)):
        begun(CSVLogger(path, separator=";", append=append)).on_epoch_end(0, {"loss": 0.5})
        assert [row["loss"] for row in rows(path, ";")] == ["0.5"] * expected


def test_columns_that_change(tmp_path: Path) -> None:
    logger = begun(CSVLogger(tmp_path / "log.csv"))
    logger.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.25})
    logger.on_epoch_end(1, {"loss": 0.5})
    assert [row["val_loss"] for row in rows(tmp_path / "log.csv")] == ["0.25", ""]
    logger.on_epoch_end(2, {"loss": 0.5, "mae": 1.0})
    assert [list(row.values()) for row in rows(tmp_path / "log.csv")] == [
        ["0", "0.5", "0.25", ""],
        ["1", "0.5", "", ""],
        ["2", "0.5", "", "1.0"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_validation_every_other_epoch_and_a_second_fit(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    trainer = Trainer(classifier(), "sgd", strategy=ON_CPU)
    for append, initial_epoch in ((False, 0), (True, 3)):
        trainer.fit(
            class_batches(rows=16),
            epochs=initial_epoch + 3,
            initial_epoch=initial_epoch,
            validation_data=class_batches(rows=16),
            validation_freq=2,
            callbacks=[CSVLogger(path, append=append)],
            verbose=0,
        )
    assert [row["epoch"] for row in rows(path)] == ["0", "1", "2", "3", "4", "5"]
    assert [row["val_loss"] != "" for row in rows(path)] == [False, True, False, True, False, True]
