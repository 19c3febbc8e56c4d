"""A JSON object an epoch, on disk when the epoch ends."""

import json
from pathlib import Path

from tests.callbacks.helpers import Values, small_trainer
from tests.trainer.helpers import class_batches
from xlatrainer.callbacks.json_logger import JSONLogger
from xlatrainer.callbacks.lambda_callback import LambdaCallback


def test_the_values_of_the_history(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    sizes: list[int] = []
    look = LambdaCallback(on_epoch_end=lambda epoch, logs: sizes.append(len(path.read_text().splitlines())))
    trainer = small_trainer(metrics=["accuracy"])
    values = Values([None, float("inf"), 2.0], "extra")
    history = trainer.fit(class_batches(), epochs=3, callbacks=[values, JSONLogger(path), look], verbose=0)
    assert sizes == [1, 2, 3]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in lines] == history.history["loss"]
    assert [(line["epoch"], line["step"]) for line in lines] == [(0, 7), (1, 14), (2, 21)]
    assert [line.get("extra", "none") for line in lines] == ["none", None, 2.0]


def test_append_and_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for append, expected in ((False, 1), (True, 2), (False, 1)):
        small_trainer().fit(class_batches(rows=16), callbacks=[JSONLogger(path, append=append)], verbose=0)
        assert len(path.read_text().splitlines()) == expected
