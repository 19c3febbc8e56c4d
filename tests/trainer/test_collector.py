"""What Python's garbage collector looks through while a process trains."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import xlatrainer as xla
from xlatrainer.backend import counters


class _Frozen(xla.callbacks.Callback):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.counts.append(gc.get_freeze_count())


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def _fit() -> list[int]:
    """How many objects are frozen at the end of each step."""
    model = nn.Linear(3, 2)
    trainer = xla.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss="mse")
    seen = _Frozen()
    trainer.fit(torch.ones(8, 3), torch.ones(8, 2), batch_size=4, callbacks=[seen], verbose=0)
    return seen.counts


def test_the_first_training_sets_aside_what_was_there_and_a_later_one_does_not() -> None:
    counters.reset()
    assert all(count > 10_000 for count in _fit())
    assert gc.get_freeze_count() == 0
    assert _fit() == [0, 0]


def test_what_fails_leaves_nothing_set_aside() -> None:
    counters.reset()
    trainer = xla.Trainer(nn.Linear(3, 2), "sgd", loss="mse")
    with pytest.raises(RuntimeError):
        trainer.fit(torch.ones(8, 5), torch.ones(8, 2), batch_size=4, verbose=0)
    assert gc.get_freeze_count() == 0


def test_objects_that_the_user_froze_stay_frozen() -> None:
    counters.reset()
    gc.freeze()
    frozen = gc.get_freeze_count()
    _fit()
    assert gc.get_freeze_count() > 0.9 * frozen
