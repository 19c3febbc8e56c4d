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
    """One row of the table: `variable` is the environment variable, `default` gives the type as well.

    `accepted` lists the values there are; empty means any of the type.
    """

    variable: str
    default: Any
    meaning: str
    accepted: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """The value that `text` stands for; raises `ValueError` if it is none of those accepted."""
        if self.accepted and text.lower() not in self.accepted:
            raise ValueError(f"{self.variable}={text!r}: accepted are {', '.join(map(repr, self.accepted))}")
        try:
            return type(self.default)(text)
        except ValueError:
            wanted = type(self.default).__name__
            raise ValueError(f"{self.variable}={text!r} is no {wanted}; it is {self.meaning}") from None


SETTINGS: dict[str, Setting] = {
    "platform": Setting("PJRT_DEVICE", "", "CPU, GPU (or CUDA) or TPU; empty: what jax finds"),
    "fallback": Setting(
        "XLATRAINER_FALLBACK", "warn", "operators without a lowering: run on the CPU, or fail", ("warn", "error")
    ),
    "check_indices": Setting(
        "XLATRAINER_CHECK_INDICES", "on", "whether programs compiled from now on check indices", ("on", "off")
    ),
    "replay": Setting("XLATRAINER_REPLAY", "on", "whether a stable step is run without its Python", ("on", "off")),
    "cache_dir": Setting(
        "XLATRAINER_CACHE_DIR",
        "",
        "the folder of compiled programs, or off; empty: xlatrainer in the user's cache folder",
    ),
    "cache_readonly": Setting(
        "XLATRAINER_CACHE_READONLY", "off", "whether compiled programs are only read from the cache", ("on", "off")
    ),
    "cache_megabytes": Setting(
        "XLATRAINER_CACHE_MEGABYTES", 2048, "the size of the cache beyond which the least recently used programs go"
    ),
    "keep_memory": Setting(
        "XLATRAINER_KEEP_MEMORY",
        "on",
        "whether glibc keeps freed memory for the next step if XLA runs on the CPU; read at the device's first use",
        ("on", "off"),
    ),
    "max_async_closures": Setting(
        "XLA_MAX_ASYNC_QUEUE", 100, "asynchronous step closures that may wait before a step waits for them"
    ),
    "max_pending_nodes": Setting(
        "XLATRAINER_MAX_PENDING_NODES", 2000, "nodes after which the next host-to-device copy ends the trace"
    ),
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
    return setting.read(text)


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
