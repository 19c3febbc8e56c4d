"""Which files are written, when, and which are deleted: only those that this run wrote."""

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.callbacks.helpers import Values, counts, fit_with, since, small_trainer
from tests.trainer.helpers import class_batches
from xlatrainer.callbacks import frequency as frequency_module
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.early_stopping import EarlyStopping
from xlatrainer.callbacks.model_checkpoint import ModelCheckpoint


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_epoch_with_names_filled_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "new" / "{epoch:02d}-{step}-{val_loss:.2f}", verbose=1)
    fit_with([0.5, 0.25], checkpoint)
    assert names(tmp_path / "new") == ["01-1-0.50", "02-2-0.25"]
    assert checkpoint.last_path == str(tmp_path / "new" / "02-2-0.25")
    assert capsys.readouterr().out.splitlines() == [
        f"Epoch 1: saved {tmp_path / 'new' / '01-1-0.50'}",
        f"Epoch 2: saved {tmp_path / 'new' / '02-2-0.25'}",
    ]


def test_what_is_saved_can_be_gone_on_from(tmp_path: Path) -> None:
    trainer = small_trainer()
    checkpoint = ModelCheckpoint(tmp_path / "{step}", save_freq=3)
    history = trainer.fit(class_batches(), epochs=2, callbacks=[checkpoint], verbose=0)
    assert names(tmp_path) == ["12", "3", "6", "9"]
    checkpoint = ModelCheckpoint(tmp_path / "after-{epoch}")
    trainer = small_trainer()
    trainer.fit(class_batches(), callbacks=[checkpoint], verbose=0)
    resumed = small_trainer()
    resumed.load(tmp_path / "after-1")
    assert (resumed.epoch, resumed.step) == (1, 7)
    again = resumed.fit(class_batches(), epochs=2, initial_epoch=1, verbose=0)
    assert again.history["loss"] == history.history["loss"][1:]


@pytest.mark.parametrize(
    ("values", "arguments", "expected"),
    [
        ([3, 2, 2.5, 1], {"save_best_only": True}, [1, 2, 4]),
        ([3, 2, 2.5, 1], {"save_best_only": True, "initial_value_threshold": 2.2}, [2, 4]),
        ([3, 2, 2.5, 1], {"save_best_only": True, "mode": "max"}, [1]),
        ([3, 2, 2.5, 1], {"save_best_only": True, "max_to_keep": 1}, [4]),
        ([3, 2, 2.5, 1], {"max_to_keep": 2}, [3, 4]),
        ([3, 2, 2.5, 1], {"keep_last": 1}, [4]),
        ([2, 3, 1, 4], {"save_top_k": 2}, [1, 3]),
        ([2, 3, 1, 4], {"keep_best": 2, "mode": "max"}, [2, 4]),
        ([2, 3, 1, 4, 5], {"save_top_k": 1, "max_to_keep": 1}, [3, 5]),
        ([float("nan"), 1, float("nan"), 2], {"save_top_k": 2}, [2, 4]),
        ([None, 2, None, 1], {"save_best_only": True}, [2, 4]),
    ],
)
@pytest.mark.filterwarnings("ignore:ModelCheckpoint monitors")
def test_which_are_kept(
    values: list[float | None], arguments: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", **arguments)
    fit_with(values, checkpoint)
    assert names(tmp_path) == [str(epoch) for epoch in expected]
    if checkpoint.monitor is not None:
        assert checkpoint.best_path is not None
        assert Path(checkpoint.best_path).exists()


def test_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def tick() -> float:
        now[0] += 60.0
        return now[0]

    monkeypatch.setattr(frequency_module.time, "monotonic", tick)
    checkpoint = ModelCheckpoint(tmp_path / "{step}-{batch}", save_freq="3 minutes")
    small_trainer().fit(class_batches(rows=16 * 8), callbacks=[checkpoint], verbose=0)
    assert names(tmp_path) == ["3-3", "6-6"]


def test_what_earlier_runs_wrote_stays(tmp_path: Path) -> None:
    for epoch in ("1", "7"):
        (tmp_path / epoch).write_text("of an earlier run")
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", max_to_keep=1)
    fit_with([1, 1, 1], checkpoint)
    assert names(tmp_path) == ["3", "7"]  # 1 was written over, then deleted as this run's
    fit_with([1, 1], checkpoint)
    assert names(tmp_path) == ["2", "3", "7"]


def test_in_the_background_nothing_goes_before_what_replaces_it_is_there(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", max_to_keep=1, async_save=True)

    class Look(Callback):
        runs_last = True

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.trainer.wait_for_saves()
            seen.append(names(tmp_path))

    fit_with([1, 1, 1, 1], checkpoint, Look())
    assert seen == [["1"], ["1", "2"], ["2", "3"], ["3", "4"]]
    assert names(tmp_path) == ["4"]
    with pytest.raises(ValueError, match="async_save is for whole checkpoints"):
        ModelCheckpoint("{epoch}", save_weights_only=True, async_save=True)


def test_behind_a_url() -> None:
    memory = fsspec.filesystem("memory")
    fit_with([3, 2, 1], ModelCheckpoint("memory://runs-of-a-test/{epoch}", max_to_keep=2))
    assert sorted(path.rpartition("/")[2] for path in memory.ls("/runs-of-a-test", detail=False)) == ["2", "3"]
    resumed = small_trainer()
    resumed.load("memory://runs-of-a-test/3")
    assert resumed.step == 3
    memory.rm("/runs-of-a-test", recursive=True)


@pytest.mark.filterwarnings("ignore:the loss")
def test_the_last_sound_one_stays_when_a_training_diverges(tmp_path: Path) -> None:
    class Diverges(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any) -> None:
            if epoch == 2:
                self.trainer.model.get_parameter("3.weight").data.fill_(float("nan"))

    fit_with([1, 1, 1, 1, 1], Diverges(), ModelCheckpoint(tmp_path / "{epoch}", max_to_keep=1))
    assert names(tmp_path) == ["2", "5"]


def test_weights_alone(tmp_path: Path) -> None:
    trainer = small_trainer("xla")
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}.safetensors", save_weights_only=True, max_to_keep=2)
    fit_with([3, 2, 1], checkpoint, trainer=trainer)
    assert names(tmp_path) == ["2.safetensors", "3.safetensors"]
    loaded = small_trainer()
    loaded.load_weights(tmp_path / "3.safetensors")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value.cpu(), loaded.model.state_dict()[name])


def test_one_path_is_written_over(tmp_path: Path) -> None:
    fit_with([3, 2, 1], ModelCheckpoint(tmp_path / "latest", save_best_only=True, max_to_keep=1))
    assert names(tmp_path) == ["latest"]
    with pytest.raises(ValueError, match="is one file; to keep several, name them"):
        ModelCheckpoint(tmp_path / "latest", max_to_keep=2)


def test_it_is_called_after_the_others() -> None:
    trainer = small_trainer()
    hooks = trainer._begin([ModelCheckpoint("unused"), EarlyStopping("loss")], 0, 1, _Sized())  # type: ignore[arg-type]
    assert [type(callback).__name__ for callback in hooks.callbacks] == ["EarlyStopping", "ModelCheckpoint"]


class _Sized:
    num_batches = 1

    def share(self, index: int, count: int, parts: int) -> None:
        """As an `EpochIterator` of one process."""


def test_the_state_keeps_the_best(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "{epoch}", save_best_only=True)
    fit_with([2, 1], checkpoint)
    resumed = ModelCheckpoint(tmp_path / "resumed-{epoch}", save_best_only=True)
    resumed.load_state_dict(checkpoint.state_dict())
    assert resumed.best_path == str(tmp_path / "2")
    fit_with([1.5, 0.5], resumed)
    assert names(tmp_path) == ["1", "2", "resumed-2"]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_to_keep and keep_last are two names"):
        ModelCheckpoint("{epoch}", max_to_keep=1, keep_last=1)
    with pytest.raises(ValueError, match="save_top_k must be at least 1, got 0"):
        ModelCheckpoint("{epoch}", save_top_k=0)
    with pytest.raises(ValueError, match=r"needs \['val_acc'\]; there are \['epoch', 'loss', 'step', 'val_loss'\]"):
        fit_with([1], ModelCheckpoint(tmp_path / "{val_acc}"))
    with (
        pytest.warns(UserWarning, match="ModelCheckpoint monitors 'val_loss'"),
        pytest.raises(ValueError, match="ModelCheckpoint has done nothing"),
    ):
        small_trainer().fit(
            class_batches(rows=16), callbacks=[ModelCheckpoint(tmp_path / "x", save_best_only=True)], verbose=0
        )


def test_what_it_costs(tmp_path: Path) -> None:
    """A file name without values reads none; the programs of the steps stay the same."""
    trainer = small_trainer("xla")
    batches = class_batches(rows=64)
    trainer.fit(batches, epochs=2, callbacks=[ModelCheckpoint(tmp_path / "{step}", save_freq=2)], verbose=0)
    before = counts()
    trainer.fit(batches, epochs=2, callbacks=[Values([1, 1]), ModelCheckpoint(tmp_path / "{epoch}")], verbose=0)
    found = since(before)
    assert (found["Execute"], found["UncachedCompile"], found["Replay"]) == (8, 0, 8)
