"""All settings, in one table, and the only reader of the environment for them.

A setting is read from its environment variable when it is asked for, so that a variable set late still counts;
`override` wins over the environment and is undone at the end of its block.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["SETTINGS", "Setting", "get", "override"]


@dataclass(frozen=True)
class Setting:
    """One row of the table: `variable` is the environment variable, `default` gives the type as well."""

    variable: str
    default: Any
    meaning: str


SETTINGS: dict[str, Setting] = {
    "platform": Setting("PJRT_DEVICE", "", "CPU, GPU (or CUDA) or TPU; empty: what jax finds"),
    "fallback": Setting("XLATRAINER_FALLBACK", "warn", "operators without a lowering: warn (run on the CPU), error"),
    "max_pending_nodes": Setting(
        "XLATRAINER_MAX_PENDING_NODES", 2000, "nodes after which the next host-to-device copy ends the trace"
    ),
    "verify": Setting("XLATRAINER_VERIFY", False, "check every recorded trace against the rules of a legal one"),
}

_overrides: dict[str, Any] = {}


def get(name: str) -> Any:
    """The value of the setting `name`, converted to the type of its default."""
    if name in _overrides:
        return _overrides[name]
    setting = SETTINGS[name]
    text = os.environ.get(setting.variable)
    if text is None:
        return setting.default
    if isinstance(setting.default, bool):
        return text.strip().lower() in ("1", "true", "yes", "on")
    return type(setting.default)(text)


@contextlib.contextmanager
def override(**values: Any) -> Iterator[None]:
    """Set settings for the length of a `with` block; raises `KeyError` for a name that is not in the table."""
    unknown = set(values) - set(SETTINGS)
    if unknown:
        raise KeyError(f"unknown settings {sorted(unknown)}; there are {sorted(SETTINGS)}")
    before = dict(_overrides)
    _overrides.update(values)
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)
