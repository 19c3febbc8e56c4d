"""What TensorBoard's own reader finds in the event files, and what writing them costs."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.callbacks.helpers import counts, since, small_trainer
from tests.trainer.helpers import DEVICES, class_batches
from xlatrainer.backend import counters
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.learning_rate_monitor import LearningRateMonitor
from xlatrainer.callbacks.tensorboard import TensorBoard

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard", "ignore::DeprecationWarning:google")


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0})
    return accumulator.Reload()


def scalars(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def assert_scalars(accumulator: EventAccumulator, tag: str, expected: Iterable[tuple[int, float]]) -> None:
    steps, values = zip(*expected, strict=True)
    found = scalars(accumulator, tag)
    assert [step for step, _ in found] == list(steps)
    assert [value for _, value in found] == pytest.approx(list(values))


@pytest.mark.parametrize("device", DEVICES)
def test_every_scalar_is_at_its_step(device: str, tmp_path: Path) -> None:
    trainer = small_trainer(device, metrics=["accuracy"])
    seen: dict[str, list[Any]] = {"loss": [], "accuracy": []}

    def note(batch: int, logs: Any) -> None:
        for name, values in seen.items():
            values.append((trainer.step, logs[name]))

    history = trainer.fit(
        class_batches(),
        epochs=3,
        validation_data=class_batches(rows=32, seed=9),
        callbacks=[
            LearningRateMonitor(),
            TensorBoard(tmp_path, update_freq="batch"),
            LambdaCallback(on_train_batch_end=note),
        ],
        verbose=0,
    )
    train, validation = read(tmp_path / "train"), read(tmp_path / "validation")
    for name, expected in seen.items():
        assert [step for step, _ in expected] == list(range(1, 22))
        assert_scalars(train, f"batch_{name}", expected)
        for reader, key in ((train, name), (validation, f"val_{name}")):
            assert_scalars(reader, f"epoch_{name}", enumerate(history.history[key]))
    assert [step for step, _ in scalars(train, "epoch_learning_rate")] == [0, 1, 2]
    assert sorted(validation.Tags()["scalars"]) == ["epoch_accuracy", "epoch_loss"]


@pytest.mark.parametrize(
    ("update_freq", "steps_per_execution", "steps"),
    [("epoch", 1, []), (3, 1, [3, 6, 9, 12]), (3, 2, [4, 6, 10, 12]), (100, 1, [])],
)
def test_how_often_batches_are_written(
    update_freq: str | int, steps_per_execution: int, steps: list[int], tmp_path: Path
) -> None:
    trainer = small_trainer(steps_per_execution=steps_per_execution)
    trainer.fit(class_batches(rows=96), epochs=2, callbacks=[TensorBoard(tmp_path, update_freq=update_freq)], verbose=0)
    train = read(tmp_path / "train")
    found = [step for step, _ in scalars(train, "batch_loss")] if "batch_loss" in train.Tags()["scalars"] else []
    assert found == steps


def test_a_hundred_steps_are_read_ten_times(tmp_path: Path) -> None:
    trainer = small_trainer("xla")
    batches = class_batches(rows=1600)
    trainer.fit(batches, verbose=0)
    before = counts()
    trainer.fit(batches, callbacks=[TensorBoard(tmp_path, update_freq=10)], verbose=0)
    assert since(before) == {"Execute": 100, "UncachedCompile": 0, "TransferFromDevice": 10, "Replay": 100}
    assert [step for step, _ in scalars(read(tmp_path / "train"), "batch_loss")] == list(range(110, 201, 10))


def test_histograms_of_weights_and_gradients(tmp_path: Path) -> None:
    trainer = small_trainer("xla")
    weights: list[float] = []
    batches = class_batches(rows=64)
    norms: list[float] = []

    def note(epoch: int, logs: Any) -> None:
        weights.append(trainer.model.state_dict()["0.weight"].cpu().sum().item())
        norms.append(trainer.model.get_parameter("0.weight").grad.cpu().sum().item())  # type: ignore[union-attr]

    board = TensorBoard(tmp_path, histogram_freq=2, histogram_gradients=True)
    replays = counters.value("Replay")
    trainer.fit(batches, epochs=4, callbacks=[board, LambdaCallback(on_epoch_end=note)], verbose=0)
    assert counters.value("Replay") - replays == 16 - 3  # kept gradients are first there after the first step
    train = read(tmp_path / "train")
    names = [name for name, _ in trainer.model.named_parameters()]
    assert sorted(train.Tags()["histograms"]) == sorted(f"{k}/{n}" for k in ("weights", "gradients") for n in names)
    for tag, expected in (("weights/0.weight", weights), ("gradients/0.weight", norms)):
        events = train.Histograms(tag)
        assert [event.step for event in events] == [1, 3]
        assert [event.histogram_value.num for event in events] == [128, 128]
        assert [event.histogram_value.sum for event in events] == pytest.approx([expected[1], expected[3]], rel=1e-4)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not trainer.keep_gradients


def test_without_histograms_of_gradients_none_are_kept(tmp_path: Path) -> None:
    trainer = small_trainer()
    kept: list[bool] = []
    look = LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(trainer.keep_gradients))
    trainer.fit(class_batches(rows=16), callbacks=[TensorBoard(tmp_path, histogram_freq=1), look], verbose=0)
    assert kept == [False]
    assert all(tag.startswith("weights/") for tag in read(tmp_path / "train").Tags()["histograms"])


def test_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    trainer = small_trainer()

    def spoil(epoch: int, logs: Any) -> None:
        with torch.no_grad():
            trainer.model.get_parameter("3.bias")[0] = float("nan")
            trainer.model.get_parameter("1.bias").fill_(float("inf"))

    board = TensorBoard(tmp_path, histogram_freq=1)
    trainer.fit(class_batches(rows=16), callbacks=[LambdaCallback(on_epoch_end=spoil), board], verbose=0)
    train = read(tmp_path / "train")
    assert train.Histograms("weights/3.bias")[0].histogram_value.num == 2
    assert scalars(train, "weights/3.bias/not_finite") == [(0, 1)]
    assert scalars(train, "weights/1.bias/not_finite") == [(0, 16)]
    assert "weights/1.bias" not in train.Tags()["histograms"]


def test_images_counters_speed_and_hyperparameters(tmp_path: Path) -> None:
    trainer = small_trainer("xla")

    def images(given: Any, epoch: int) -> dict[str, torch.Tensor]:
        assert given is trainer
        return {"one": torch.full((3, 4, 5), epoch / 2, device="xla"), "many": torch.zeros(2, 1, 4, 4)}

    board = TensorBoard(
        tmp_path,
        images=images,
        write_counters=True,
        write_steps_per_second=True,
        hparams={"width": 16, "optimizer": "sgd"},
    )
    history = trainer.fit(class_batches(rows=64), epochs=2, callbacks=[board], verbose=0)
    train = read(tmp_path / "train")
    assert [event.step for event in train.Images("one")] == [0, 1]
    assert [event.step for event in train.Images("many")] == [0, 1]
    assert (train.Images("one")[0].height, train.Images("one")[0].width) == (4, 5)
    assert scalars(train, "counters/Execute") == [(0, 5), (1, 10)]  # four steps, and the images
    assert [step for step, value in scalars(train, "epoch_steps_per_second") if value > 0] == [0, 1]
    hparams = read(tmp_path / "train" / "hparams")
    assert [value for _, value in scalars(hparams, "hparam/loss")] == pytest.approx(history.history["loss"][-1:])
    session = hparams.SummaryMetadata("_hparams_/session_start_info")
    assert b"width" in session.plugin_data.content
    assert b"optimizer" in session.plugin_data.content


def test_the_graph(tmp_path: Path) -> None:
    trainer = small_trainer("xla")
    example = torch.randn(2, 8)
    trainer.fit(class_batches(rows=16), callbacks=[TensorBoard(tmp_path, write_graph=example)], verbose=0)
    nodes = {node.name: node for node in read(tmp_path / "train").Graph().node}
    assert next(trainer.model.parameters()).device.type == "xla"
    (last,) = (name for name in nodes if name.startswith("3/linear"))
    assert nodes[last].op == "aten.linear.default"
    assert any(name.startswith("2/relu") for name in nodes[last].input)
    assert {node.op for node in nodes.values()} >= {"placeholder", "output"}


class Unfollowable(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs if inputs.sum() > 0 else -inputs


def test_no_graph(tmp_path: Path) -> None:
    trainer = small_trainer()
    with pytest.raises(TypeError, match="takes an example of the model's inputs"):
        TensorBoard(tmp_path, write_graph=True)
    trainer.model.append(Unfollowable())  # type: ignore[operator]
    with pytest.raises(ValueError, match="graph of Sequential cannot be written: torch.export failed"):
        trainer.fit(class_batches(rows=16), callbacks=[TensorBoard(tmp_path, write_graph=torch.ones(2, 8))], verbose=0)


def test_a_profile_of_chosen_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = small_trainer("xla")
    trainer.fit(class_batches(rows=64), callbacks=[TensorBoard(tmp_path, profile_batch=(2, 3))], verbose=0)
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    assert "Profile of the steps 2 to 3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the steps to profile"):
        TensorBoard(tmp_path, profile_batch=(3, 2))


def test_evaluate_alone(tmp_path: Path) -> None:
    trainer = small_trainer()
    trainer.fit(class_batches(rows=32), verbose=0)
    result = trainer.evaluate(class_batches(rows=32), callbacks=[TensorBoard(tmp_path)], verbose=0)
    assert_scalars(read(tmp_path / "validation"), "evaluation_loss_vs_iterations", [(2, result["loss"])])


def test_the_files_are_whole_after_an_exception(tmp_path: Path) -> None:
    def fail(batch: int, logs: Any) -> None:
        if batch == 4:
            raise OSError("no space left")

    callbacks = [TensorBoard(tmp_path, update_freq=1), LambdaCallback(on_train_batch_end=fail)]
    with pytest.raises(OSError, match="no space left"):
        small_trainer().fit(class_batches(), callbacks=callbacks, verbose=0)
    assert [step for step, _ in scalars(read(tmp_path / "train"), "batch_loss")] == [1, 2, 3, 4, 5]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match='update_freq must be "epoch", "batch" or a number'):
        TensorBoard(tmp_path, update_freq="sometimes")
    with pytest.raises(ValueError, match="histogram_freq must be at least 0, got -1"):
        TensorBoard(tmp_path, histogram_freq=-1)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"the TensorBoard callback needs .* pip install .xlatrainer\[tensorboard\]"):
        TensorBoard(tmp_path)
