"""When it stops, as in Keras, and that the best weights come back whatever ends the training."""

from typing import Any

import pytest
import torch

from tests.callbacks.helpers import Values, counts, fit_with, since, small_trainer
from tests.trainer.helpers import DEVICES, class_batches
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.early_stopping import EarlyStopping
from xlatrainer.callbacks.ema import EMA


@pytest.mark.parametrize(
    ("values", "arguments", "epochs"),
    [
        ([3, 2, 1, 1, 1, 1], {}, 4),
        ([3, 2, 1, 1, 1, 1], {"patience": 1}, 4),
        ([3, 2, 1, 1, 1, 1], {"patience": 2}, 5),
        ([3, 3, 3], {"patience": 0}, 2),
        ([3, 2, 2.5, 1, 1.5, 1.5], {"patience": 2}, 6),
        ([3, 2.9, 2.8, 2.7], {"min_delta": 0.5, "patience": 2}, 3),
        ([3, 4, 5, 5], {"mode": "max"}, 4),
        ([3, 2, 1, 0], {"baseline": 0.5, "patience": 2}, 2),
        ([3, 0.4, 0.4, 0.4], {"baseline": 0.5, "patience": 2}, 4),
        ([1, 2, 3, 4, 5], {"start_from_epoch": 3}, 5),
        ([float("nan"), float("nan"), 1], {"patience": 2}, 2),
        ([3, 2, 1, 0], {"stopping_threshold": 2, "patience": 9}, 3),
        ([3, 2, 1, 0], {"stopping_threshold": 0.5, "mode": "max", "patience": 9}, 1),
        ([3, 4, 5, 6], {"divergence_threshold": 4.5, "patience": 9}, 3),
        ([3, float("nan"), 5, 6], {"divergence_threshold": 4.5, "patience": 9}, 2),
        ([0.5, 0.2, 0.1], {"divergence_threshold": 0.3, "mode": "max", "patience": 9}, 2),
    ],
)
def test_when_it_stops(values: list[float], arguments: dict[str, Any], epochs: int) -> None:
    stopping = EarlyStopping(**arguments)
    history = fit_with(values, stopping)
    assert len(history.epoch) == epochs
    stopped = epochs < len(values) or stopping.wait >= max(stopping.patience, 1)
    assert bool(stopping.reason) is stopped
    assert (stopping.stopped_epoch == epochs - 1) if stopped else (stopping.stopped_epoch is None)


class Ends(Callback):
    """Keeps the weights of each epoch, and ends the training after `epoch` in some way."""

    def __init__(self, epoch: int, how: str) -> None:
        self.epoch = epoch
        self.how = how
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.weights.append({name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()})
        if epoch == self.epoch and self.how == "flag":
            self.trainer.stop_training = True
        if epoch == self.epoch and self.how == "error":
            raise OSError("the disk is full")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["patience", "flag", "error", "epochs"])
def test_the_best_weights_come_back(device: str, how: str) -> None:
    values = [3.0, 1.0, 2.0, 2.5] if how == "epochs" else [3.0, 1.0, 2.0, 2.5, 2.5, 2.5]
    trainer = small_trainer(device)
    pointers = [id(parameter) for parameter in trainer.model.parameters()]
    ends = Ends(3, how)
    stopping = EarlyStopping(patience=2 if how == "patience" else 10, restore_best_weights=True)
    if how == "error":
        with pytest.raises(OSError, match="the disk is full"):
            fit_with(values, stopping, ends, trainer=trainer)
    else:
        fit_with(values, stopping, ends, trainer=trainer)
    assert len(ends.weights) == 4
    assert stopping.best_epoch == 1
    assert [id(parameter) for parameter in trainer.model.parameters()] == pointers
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value.cpu(), ends.weights[1][name], rtol=0, atol=0)
    assert not torch.equal(trainer.model.state_dict()["0.weight"].cpu(), ends.weights[3]["0.weight"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_callback", [True, False])
def test_averages_of_the_best_epoch_come_back(device: str, by_callback: bool) -> None:
    trainer = small_trainer(device, learning_rate=0.3, use_ema=not by_callback, ema_momentum=0.5)
    averages: list[dict[str, torch.Tensor]] = []

    class Note(Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            assert self.trainer.ema is not None
            averages.append({name: value.cpu().clone() for name, value in self.trainer.ema.state_dict().items()})

    stopping = EarlyStopping(patience=2, restore_best_weights=True)
    fit_with([3.0, 1.0, 2.0, 2.0], stopping, *([EMA(0.5)] if by_callback else []), Note(), trainer=trainer)
    assert trainer.ema is not None
    for name, value in trainer.ema.state_dict().items():
        torch.testing.assert_close(value.cpu(), averages[1][name], rtol=0, atol=0)
        assert not torch.equal(value.cpu(), averages[3][name])
    weight = trainer.model.get_parameter("0.weight").detach().cpu()
    assert torch.equal(weight, averages[1]["0.weight"]) is by_callback


def test_training_on_is_replayed_and_compiles_nothing_more() -> None:
    trainer = small_trainer("xla")
    batches = class_batches(rows=64)
    fit: Any = {"x": batches, "epochs": 3, "verbose": 0}
    stopping = EarlyStopping(patience=5, restore_best_weights=True)
    trainer.fit(**fit, callbacks=[Values([3, 2, 1]), stopping])
    before = counts()
    trainer.fit(**fit, callbacks=[Values([3, 2, 1]), stopping])
    found = since(before)
    assert found["UncachedCompile"] == 0
    assert found["Execute"] == 3 * 4  # a copy is a step that does not write over its inputs
    assert found["Replay"] == 3 * 4
    assert found["TransferFromDevice"] == 3  # the history's loss


def test_each_fit_starts_anew_unless_its_state_was_loaded() -> None:
    stopping = EarlyStopping(patience=3)
    fit_with([1, 2, 3], stopping)
    assert (stopping.best, stopping.wait) == (1, 2)
    state = stopping.state_dict()
    history = fit_with([5, 4, 6, 7, 8], stopping)
    assert len(history.epoch) == 5
    assert stopping.best == 4
    resumed = EarlyStopping(patience=3)
    resumed.load_state_dict(state)
    history = fit_with([5, 4, 6, 7, 8], resumed)
    assert (len(history.epoch), resumed.best) == (2, 1)  # the epoch 0 never stops
    history = fit_with([5, 4, 6, 7, 8], resumed)
    assert len(history.epoch) == 5


def test_the_best_weights_survive_a_checkpoint() -> None:
    first, second = small_trainer("xla"), small_trainer("xla")
    stopping = EarlyStopping(restore_best_weights=True, patience=9)

    class Keep(Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.state = stopping.state_dict()
            self.weights = {name: value.cpu() for name, value in (self.state["best_weights"] or {}).items()}

    keep = Keep()
    fit_with([1, 2], stopping, keep, trainer=first)
    resumed = EarlyStopping(restore_best_weights=True, patience=9)
    resumed.set_trainer(second)
    resumed.load_state_dict({**keep.state, "best_weights": keep.weights})
    fit_with([2, 2], resumed, trainer=second)
    for name, value in second.model.state_dict().items():
        torch.testing.assert_close(value.cpu(), keep.weights[name], rtol=0, atol=0)


def test_an_unknown_name_is_an_error_at_the_end() -> None:
    trainer = small_trainer()
    with (
        pytest.warns(UserWarning, match=r"monitors 'val_loss', which is not in the logs; the names are \['loss'\]"),
        pytest.raises(ValueError, match="EarlyStopping has done nothing") as raised,
    ):
        trainer.fit(class_batches(rows=16), epochs=2, callbacks=[EarlyStopping()], verbose=0)
    assert raised.value.__notes__ == ["raised by the callback EarlyStopping, in on_train_end"]
    assert trainer.epoch == 2


def test_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    fit_with([1, 2, 3], EarlyStopping(patience=2, verbose=1, restore_best_weights=True))
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 3: stopped, val_loss has not become better than 1",
        "The weights of epoch 1 are back",
    ]
    with pytest.raises(ValueError, match="patience is a number of epochs"):
        EarlyStopping(patience=-1)
