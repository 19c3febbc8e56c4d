"""The public names, written by hand: a new or a missing one is a deliberate change here."""

import inspect
import re
import types
from importlib.metadata import version

import pytest

import xlatrainer

PUBLIC_NAMES = {
    "Trainer",
    "__version__",
    "add_step_closure",
    "callbacks",
    "compile",
    "counters",
    "data",
    "debug",
    "device",
    "device_count",
    "devices",
    "distributed",
    "eager_mode",
    "fork_rng",
    "get_memory_info",
    "get_rng_state",
    "initialize_cache",
    "is_eager_mode",
    "launch",
    "load_stablehlo",
    "manual_seed",
    "metrics",
    "precision",
    "profiler",
    "real_devices",
    "save_stablehlo",
    "set_rng_state",
    "stablehlo",
    "strategies",
    "step",
    "sync",
    "wait_device_ops",
}
PUBLIC_MODULES = {"callbacks", "counters", "data", "debug", "distributed", "metrics", "profiler", "strategies"}


def test_the_names_are_these() -> None:
    assert set(xlatrainer.__all__) == PUBLIC_NAMES
    assert len(xlatrainer.__all__) == len(PUBLIC_NAMES)


def test_nothing_else_is_in_sight() -> None:
    """Beyond `__all__` the package holds its own submodules and private names, no import that slipped in."""
    visible = {name for name, value in vars(xlatrainer).items() if not _is_submodule(value)}
    assert {name for name in visible if not name.startswith("_")} <= PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_it_is_documented(name: str) -> None:
    value = getattr(xlatrainer, name)
    if isinstance(value, str):
        return
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert value.__doc__, f"{name} only inherits its docstring"


@pytest.mark.parametrize("name", sorted(PUBLIC_MODULES))
def test_its_exports_exist_and_are_documented(name: str) -> None:
    """A public module declares its own names the same way."""
    module = getattr(xlatrainer, name)
    assert isinstance(module, types.ModuleType)
    assert module.__all__, f"{name} declares no names"
    for export in module.__all__:
        assert inspect.getdoc(getattr(module, export)), f"{name}.{export} has no docstring"


def test_public_methods_are_documented() -> None:
    undocumented = [
        f"Trainer.{name}"
        for name, member in inspect.getmembers(xlatrainer.Trainer)
        if not name.startswith("_") and callable(member) and not inspect.getdoc(member)
    ]
    assert undocumented == []


def test_the_version_is_the_installed_one() -> None:
    assert xlatrainer.__version__ == version("xlatrainer")
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", xlatrainer.__version__)


def _is_submodule(value: object) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.startswith("xlatrainer.")
