"""Several steps in one program: the same as one after the other."""

from typing import Any

import pytest
import torch

from tests.trainer.helpers import class_batches, classifier
from xlatrainer.backend import counters
from xlatrainer.backend.executor import Lost
from xlatrainer.backend.ir import Value, make_spec
from xlatrainer.backend.replay.step import ReplayedStep
from xlatrainer.backend.tensor import storage_data
from xlatrainer.callbacks.callback import Callback
from xlatrainer.errors import LostValueError
from xlatrainer.trainer.trainer import Trainer


class Seen(Callback):
    """Which batches were seen, and the loss after each."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any) -> None:
        self.begun.append(batch)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.ended.append(batch)
        self.losses.append(logs["loss"])


def trained(
    steps: int, optimizer: str, model: torch.nn.Module | None = None, rows: int = 16 * 12
) -> tuple[Trainer, Seen, Any]:
    seen = Seen()
    trainer = Trainer(
        model or classifier(),
        optimizer,
        metrics=["accuracy"],
        callbacks=[seen],
        learning_rate=0.01,
        steps_per_execution=steps,
    )
    torch.manual_seed(5)
    history = trainer.fit(class_batches(rows=rows), epochs=3, verbose=0)
    return trainer, seen, history.history


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop"])
def test_the_same_as_one_by_one(optimizer: str) -> None:
    before = counters.value("Replay")
    one, ones, expected = trained(1, optimizer)
    four, fours, actual = trained(4, optimizer)
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values, rel=1e-5)
    assert fours.ended[:3] == [3, 7, 11]
    assert fours.begun[:3] == [0, 4, 8]
    assert fours.losses == pytest.approx([ones.losses[i] for i in range(3, 36, 4)], rel=1e-5)
    assert four.step == one.step == 36
    assert four.num_examples == one.num_examples
    for mine, theirs in zip(
        four.optimizer.state_dict()["state"].values(), one.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert mine.get("step") == theirs.get("step")
    assert counters.value("Replay") - before >= 2 * 30


def test_one_execution_for_all_of_them() -> None:
    trainer, _, _ = trained(4, "adamw")
    batches = class_batches(rows=16 * 12)
    before = counters.snapshot()
    trainer.fit(batches, epochs=2, verbose=0)
    after = counters.snapshot()
    assert after["Execute"] - before["Execute"] == 2 * 3
    assert after.get("UncachedCompile", 0) == before.get("UncachedCompile", 0)


def test_random_numbers_differ_from_step_to_step_and_are_those_of_single_steps() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3))

    _, _, expected = trained(1, "sgd", model())
    _, _, actual = trained(3, "sgd", model())
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_rest_of_fewer_or_shorter_batches_goes_one_by_one() -> None:
    _, _, expected = trained(1, "sgd", rows=16 * 9 + 5)
    _, seen, actual = trained(4, "sgd", rows=16 * 9 + 5)
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert seen.ended[:3] == [3, 7, 9]


def test_an_index_out_of_range_within_a_series_is_reported() -> None:
    class Look(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    good = (torch.tensor([0, 3]), torch.tensor([0, 1]))
    bad = (torch.tensor([0, 4]), torch.tensor([0, 1]))
    trainer = Trainer(Look(), "sgd", learning_rate=0.1, steps_per_execution=4)
    trainer.fit([good] * 12, verbose=0)
    with pytest.raises(IndexError):
        trainer.fit([good, good, bad, good], verbose=0)


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_number_below_one_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Trainer(classifier(), steps_per_execution=wrong)


@pytest.mark.parametrize("lost", ["first argument", "later argument", "constant of the steps"])
def test_a_value_that_was_lost_is_told_before_anything_runs(lost: str) -> None:
    total, factor = torch.zeros(2, device="xla"), torch.ones(2, device="xla")

    def add(x: torch.Tensor) -> torch.Tensor:
        total.add_(x * factor)
        return total.sum()

    step = ReplayedStep(add)
    batches = [(torch.ones(2, device="xla"),) for _ in range(2)]
    for _ in range(3):
        step.many(batches)
    place = {"first argument": batches[0][0], "later argument": batches[1][0], "constant of the steps": factor}[lost]
    storage_data(place).value = Value(make_spec((2,), torch.float32), Lost("its program failed"))
    replayed = counters.value("Replay")
    with pytest.raises(LostValueError, match="its program failed"):
        step.many(batches)
    storage_data(place).value = storage_data(torch.ones(2, device="xla") + 0).value
    step.many(batches)
    assert total.tolist() == [8.0, 8.0]
    assert counters.value("Replay") == replayed + 2
