"""The learning rates of a plateau, by hand, and that they compile nothing."""

from typing import Any

import pytest
import torch

from tests.callbacks.helpers import Values, counts, fit_with, since, small_trainer
from tests.trainer.helpers import class_batches
from xlatrainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from xlatrainer.trainer.trainer import Trainer


def by_hand(values: list[float], factor: float, patience: int, cooldown: int, min_lr: float, lr: float) -> list[float]:
    """The learning rate of each epoch, after Keras's rules."""
    rates, best, wait, cooling = [], float("inf"), 0, 0
    for value in values:
        rates.append(lr)
        if cooling:
            cooling -= 1
            wait = 0
        if value < best - 1e-4:
            best, wait = value, 0
        elif not cooling:
            wait += 1
            if wait >= patience and lr > min_lr:
                lr, wait, cooling = max(lr * factor, min_lr), 0, cooldown
    return rates


@pytest.mark.parametrize(("patience", "cooldown", "min_lr"), [(1, 0, 0.0), (2, 0, 0.0), (1, 2, 0.0), (1, 0, 0.03)])
def test_the_learning_rates(patience: int, cooldown: int, min_lr: float) -> None:
    values = [3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5]
    callback = ReduceLROnPlateau(factor=0.5, patience=patience, cooldown=cooldown, min_lr=min_lr)
    history = fit_with(values, callback, trainer=small_trainer(learning_rate=0.1))
    expected = by_hand(values, 0.5, patience, cooldown, min_lr, 0.1)
    assert history.history["learning_rate"] == pytest.approx(expected)
    assert len(set(expected)) > 2


def test_every_param_group_is_reduced_and_nothing_is_compiled() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 3))
    groups = [{"params": model[0].parameters(), "lr": 0.4}, {"params": model[1].parameters(), "lr": 0.02}]
    trainer = Trainer(model, torch.optim.SGD(groups))
    fit: Any = {"x": class_batches(rows=64), "epochs": 4, "verbose": 0}
    trainer.fit(**fit)
    before = counts()
    history = trainer.fit(**fit, callbacks=[Values([1, 1, 1, 1]), ReduceLROnPlateau(patience=1, factor=0.5)])
    assert since(before) == {"Execute": 16, "UncachedCompile": 0, "TransferFromDevice": 4, "Replay": 16}
    assert history.history["learning_rate"] == pytest.approx([0.4, 0.4, 0.2, 0.1])
    assert history.history["learning_rate_1"] == pytest.approx([0.02, 0.02, 0.01, 0.005])


def test_state_and_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    callback = ReduceLROnPlateau(patience=2, factor=0.5, verbose=1)
    fit_with([1, 1], callback, trainer=small_trainer(learning_rate=0.1))
    resumed = ReduceLROnPlateau(patience=2, factor=0.5, verbose=1)
    resumed.load_state_dict(callback.state_dict())
    assert (resumed.best, resumed.wait) == (1, 1)
    fit_with([1, 1], resumed, trainer=small_trainer(learning_rate=0.1))
    assert capsys.readouterr().out == "Epoch 1: learning rate 0.1 -> 0.05\n"
    with pytest.raises(ValueError, match="factor must be between 0 and 1, got 1.5"):
        ReduceLROnPlateau(factor=1.5)
