"""One rule for what is better, and what happens to a name that is not there."""

import math
import warnings
from typing import Any

import pytest

from xlatrainer.callbacks.monitor import Monitor


@pytest.mark.parametrize(
    ("name", "higher"),
    [
        ("loss", False),
        ("val_loss", False),
        ("val_mae", False),
        ("perplexity", False),
        ("accuracy", True),
        ("val_top5_accuracy", True),
        ("val_f1", True),
        ("AUC", True),
    ],
)
def test_auto_tells_by_the_name(name: str, higher: bool) -> None:
    assert Monitor(name).higher_is_better is higher


@pytest.mark.parametrize("name", ["val_thing", "accuracy_loss"])
def test_a_name_that_does_not_tell_needs_a_mode(name: str) -> None:
    with pytest.raises(ValueError, match='is not known; pass mode="max" or mode="min"'):
        Monitor(name)
    assert Monitor(name, "max").higher_is_better
    with pytest.raises(ValueError, match="mode must be"):
        Monitor(name, "least")  # type: ignore[arg-type]


def test_better() -> None:
    lower, higher = Monitor("x", "min", 0.5), Monitor("x", "max", -0.5)
    assert lower.is_better(1.0, than=2.0)
    assert not lower.is_better(1.5, than=2.0)
    assert higher.is_better(2.0, than=1.0)
    assert not higher.is_better(1.5, than=1.0)
    for monitor in (lower, higher):
        assert monitor.is_better(1e30, than=monitor.worst)
        assert not monitor.is_better(math.nan, than=monitor.worst)
        assert not monitor.is_better(monitor.worst, than=monitor.worst)


def test_a_missing_name_warns_once_and_is_an_error_if_it_never_comes() -> None:
    monitor = Monitor("val_loss", owner="EarlyStopping")
    logs: Any = {"loss": 1.0, "accuracy": 0.5}
    with pytest.warns(UserWarning, match=r"EarlyStopping monitors 'val_loss'.*\['accuracy', 'loss'\].*validation_data"):
        assert monitor.read(logs) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.read(logs) is None
    with pytest.raises(ValueError, match="never there, so EarlyStopping has done nothing"):
        monitor.end()
    assert monitor.read({"val_loss": 0.5}) == 0.5
    monitor.end()
    monitor.begin()
    monitor.end()
