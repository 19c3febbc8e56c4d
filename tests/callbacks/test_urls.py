"""What callbacks write goes to URLs as it goes to folders: here to a Google Cloud Storage server."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import xlatrainer as xla
from xlatrainer import storage
from xlatrainer.callbacks import BackupAndRestore, CSVLogger, JSONLogger, ModelCheckpoint, Profiler, TensorBoard
from xlatrainer.errors import CheckpointError
from xlatrainer.strategies.single import SingleDeviceStrategy


def trainer(**options: Any) -> xla.Trainer:
    torch.manual_seed(0)
    return xla.Trainer(torch.nn.Linear(2, 1), "sgd", strategy=SingleDeviceStrategy("cpu"), **options)


BATCHES = [(torch.ones(4, 2), torch.zeros(4, 1))] * 2


def names(folder: str) -> list[str]:
    return [entry.name for entry in storage.list_folder(folder)]


def test_csv_and_json(bucket: str) -> None:
    for append in (False, True):
        callbacks = [CSVLogger(f"{bucket}/new/log.csv", append=append), JSONLogger(f"{bucket}/log.json", append=append)]
        trainer().fit(BATCHES, epochs=2, callbacks=callbacks, verbose=0)
    rows = list(csv.DictReader(io.StringIO(storage.read(f"{bucket}/new/log.csv").decode())))
    assert [row["epoch"] for row in rows] == ["0", "1", "0", "1"]
    lines = [json.loads(line) for line in storage.read(f"{bucket}/log.json").splitlines()]
    assert [line["loss"] for line in lines] == [float(row["loss"]) for row in rows]
    assert names(f"{bucket}/new") == ["log.csv"]


def test_tensorboard(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer().fit(BATCHES, epochs=3, callbacks=[TensorBoard(f"{bucket}/logs", profile_batch=2)], verbose=0)
    (url,) = re.findall(r"Profile of the steps 2 to 2: (gs://\S+)", capsys.readouterr().out)
    assert storage.stat(url).size
    (file,) = storage.list_folder(f"{bucket}/logs/train")
    (tmp_path / file.name).write_bytes(storage.read(file.path))
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("epoch_loss")] == [0, 1, 2]


def test_a_profile(bucket: str) -> None:
    profiler = Profiler((1, 2), f"{bucket}/logs")
    trainer().fit(BATCHES, callbacks=[profiler], verbose=0)
    assert isinstance(profiler.path, str)
    assert profiler.path.startswith(f"{bucket}/logs/plugins/profile/")
    assert storage.stat(profiler.path).size


def test_checkpoints_and_going_on(bucket: str) -> None:
    first = trainer(output_dir=f"{bucket}/output", max_to_keep=2)
    callbacks = [ModelCheckpoint(f"{bucket}/best/{{epoch}}"), BackupAndRestore(f"{bucket}/backup")]
    first.fit(BATCHES, epochs=3, callbacks=callbacks, verbose=0)
    kept = names(f"{bucket}/output/checkpoints")
    assert len(kept) == 2
    assert len(names(f"{bucket}/best")) == 3
    first.save_weights(f"{bucket}/weights.safetensors")
    second = trainer()
    again = [ModelCheckpoint(f"{bucket}/best/{{epoch}}")]
    second.fit(BATCHES, epochs=3, resume_from=f"{bucket}/output/checkpoints/{max(kept)}", callbacks=again, verbose=0)
    assert second.epoch == 3
    assert torch.equal(second.model.weight, first.model.weight)  # type: ignore[arg-type]
    third = trainer()
    third.load_weights(f"{bucket}/weights.safetensors")
    assert torch.equal(third.model.weight, first.model.weight)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no bucket 'none'"):
        third.save_weights("gs://none/weights.safetensors")
