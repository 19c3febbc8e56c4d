"""Strategies by name."""

import pytest

from xlatrainer.strategies.registry import resolve_strategy
from xlatrainer.strategies.single import SingleDeviceStrategy


def test_by_name_on_xla() -> None:
    assert isinstance(resolve_strategy("single"), SingleDeviceStrategy)


def test_an_object_is_itself() -> None:
    strategy = SingleDeviceStrategy("cpu")
    assert resolve_strategy(strategy) is strategy


def test_errors_list_the_names() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'ddpp'; the names are \['auto', 'single', 'ddp', 'fsdp', "):
        resolve_strategy("ddpp")
    with pytest.raises(TypeError, match=r"one of \['auto', 'single', .*\], not ABCMeta"):
        resolve_strategy(SingleDeviceStrategy)  # type: ignore[arg-type]
