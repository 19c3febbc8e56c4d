"""Logs are fetched when they are read, all together, once."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from xlatrainer.strategies.single import SingleDeviceStrategy
from xlatrainer.trainer.logs import Logs


class Counting(SingleDeviceStrategy):
    """CPU, but every fetch is noted, and tensors become ready when told."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.fetched: list[int] = []
        self.ready = False

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.fetched.append(len(tensors))
        return super().fetch(tensors)

    def is_ready(self, tensor: Tensor) -> bool:
        return self.ready


@pytest.fixture
def strategy() -> Counting:
    return Counting()


@pytest.fixture
def logs(strategy: Counting) -> Logs:
    return Logs({"loss": torch.tensor(0.5), "accuracy": torch.tensor(0.25)}, strategy)


def test_names_cost_nothing(logs: Logs, strategy: Counting) -> None:
    assert list(logs) == ["loss", "accuracy"]
    assert "loss" in logs
    assert "mae" not in logs
    assert len(logs) == 2
    assert repr(logs) == "Logs({'loss': …, 'accuracy': …})"
    assert strategy.fetched == []


def test_one_fetch_for_all(logs: Logs, strategy: Counting) -> None:
    assert logs["loss"] == 0.5
    assert dict(logs) == {"loss": 0.5, "accuracy": 0.25}
    assert logs.get("mae") is None
    assert strategy.fetched == [2]
    assert repr(logs) == "Logs({'loss': 0.5, 'accuracy': 0.25})"


def test_an_unknown_name_fetches_nothing(logs: Logs, strategy: Counting) -> None:
    with pytest.raises(KeyError):
        logs["mae"]
    assert strategy.fetched == []


def test_is_ready(logs: Logs, strategy: Counting) -> None:
    assert not logs.is_ready
    strategy.ready = True
    assert logs.is_ready
    strategy.ready = False
    assert logs["loss"] == 0.5
    assert logs.is_ready
    assert strategy.fetched == [2]


def test_validation_is_fetched_along(logs: Logs, strategy: Counting) -> None:
    both = logs.with_validation(Logs({"loss": torch.tensor(0.75)}, strategy))
    assert dict(both) == {"loss": 0.5, "accuracy": 0.25, "val_loss": 0.75}
    assert strategy.fetched == [3]


def test_values_are_floats(strategy: Counting) -> None:
    logs = Logs({"count": torch.tensor(3), "rate": 2}, strategy)
    assert [type(value) for value in logs.values()] == [float, float]


def test_values_may_be_added_which_reads_nothing(logs: Logs, strategy: Counting) -> None:
    logs["learning_rate"] = 0.125
    logs["norm"] = torch.tensor(2.0)
    assert strategy.fetched == []
    assert dict(logs) == {"loss": 0.5, "accuracy": 0.25, "learning_rate": 0.125, "norm": 2.0}
    assert strategy.fetched == [3]
    del logs["norm"]
    assert list(logs) == ["loss", "accuracy", "learning_rate"]
