"""Strategies by name."""

import pytest
from torch import nn

from xlatrainer.backend import memory, runtime
from xlatrainer.strategies.ddp import DDPStrategy
from xlatrainer.strategies.fsdp import FSDPStrategy
from xlatrainer.strategies.registry import STRATEGIES, resolve_strategy
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


def test_every_name_makes_its_strategy() -> None:
    made = {name: resolve_strategy(name) for name in STRATEGIES}
    assert {name: type(strategy).__name__ for name, strategy in made.items()} == {
        "single": "SingleDeviceStrategy",
        "ddp": "DDPStrategy",
        "fsdp": "FSDPStrategy",
        "hsdp": "HSDPStrategy",
        **dict.fromkeys(["zero1", "zero2", "zero3"], "FSDPStrategy"),
    }
    levels = [strategy.zero for name, strategy in made.items() if isinstance(strategy, FSDPStrategy)]
    assert levels == [3, 3, 1, 2, 3]


def test_auto_is_ddp_while_the_model_leaves_room_and_then_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 250, bias=False)  # 1 MB; with gradient and optimizer state 4
    monkeypatch.setattr(memory, "memory_limit", lambda: 8 * 11_000_000)  # which the 8 devices of a CPU share
    assert isinstance(resolve_strategy("auto", model), DDPStrategy)
    monkeypatch.setattr(memory, "memory_limit", lambda: 8 * 9_000_000)
    strategy = resolve_strategy("auto", model)
    assert isinstance(strategy, FSDPStrategy)
    assert strategy.zero == 3
    monkeypatch.setattr(memory, "memory_limit", lambda: None)
    assert isinstance(resolve_strategy("auto", model), DDPStrategy)


def test_auto_is_single_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "global_devices", lambda: [runtime.default_device()])
    assert type(resolve_strategy("auto", nn.Linear(2, 2))) is SingleDeviceStrategy
