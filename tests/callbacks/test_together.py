"""All callbacks in one training: the same steps, programs and losses as without them."""

from pathlib import Path
from typing import Any

from tests.callbacks.helpers import counts, since, small_trainer
from tests.trainer.helpers import class_batches
from xlatrainer import callbacks as all_callbacks
from xlatrainer.callbacks.callback import Callback

STEPS = 20
EPOCHS = 3


def everyone(folder: Path) -> list[Callback]:
    return [
        all_callbacks.LearningRateScheduler(lambda epoch, lr: lr),
        all_callbacks.ReduceLROnPlateau(patience=5),
        all_callbacks.EarlyStopping(patience=5, restore_best_weights=True),
        all_callbacks.LearningRateMonitor(),
        all_callbacks.DeviceStats(),
        all_callbacks.TerminateOnNaN(check_every=10),
        all_callbacks.Timer("1 hour"),
        all_callbacks.GradientAccumulationScheduler({0: 1}),
        all_callbacks.CSVLogger(folder / "log.csv"),
        all_callbacks.JSONLogger(folder / "log.jsonl"),
        all_callbacks.TensorBoard(folder / "logs", update_freq=10, write_counters=True),
        all_callbacks.ModelCheckpoint(folder / "{epoch}", max_to_keep=1, save_top_k=1),
        all_callbacks.BackupAndRestore(folder / "backup"),
        all_callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]


def test_all_together_run_nothing_more(tmp_path: Path) -> None:
    fit: Any = {"epochs": EPOCHS, "validation_data": class_batches(rows=32, seed=7), "verbose": 0}
    plain, watched = small_trainer("xla"), small_trainer("xla")
    expected = [plain.fit(class_batches(rows=16 * STEPS), **fit).history["loss"] for _ in range(2)]
    found = [watched.fit(class_batches(rows=16 * STEPS), **fit, callbacks=everyone(tmp_path)).history["loss"]]
    before = counts()
    found.append(watched.fit(class_batches(rows=16 * STEPS), **fit, callbacks=everyone(tmp_path)).history["loss"])
    counted = since(before)
    assert found == expected
    assert counted["UncachedCompile"] == 0
    assert counted["Execute"] == EPOCHS * (STEPS + 2)
    assert counted["Replay"] == EPOCHS * (STEPS + 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "backup", "log.csv", "log.jsonl", "logs"]
