"""How many compiled programs may be loaded at once: the least recently used give their machine code back.

XLA maps the code of each program into memory in dozens of pieces, and Linux allows a process a number of those
(`vm.max_map_count`); beyond it XLA ends the process. A program that gave its code back gets it again when it is needed:
from the cache on disk, or from the compiler.

May import: counters, config.
"""

import weakref
from pathlib import Path
from typing import Protocol

from xlatrainer import config
from xlatrainer.backend import counters

__all__ = ["Loaded", "make_room", "used"]

_LOOK_EVERY = 32  # programs that are loaded between two looks at the memory maps
_SHARE = 0.7  # of the memory maps that may be taken

_MAPS = Path("/proc/self/maps")
_MAX_MAPS = Path("/proc/sys/vm/max_map_count")


class Loaded(Protocol):
    """What can give its machine code back."""

    def release(self) -> None:
        """Give it back."""


class _Order:
    """The programs that are loaded, the least recently used first."""

    programs: "weakref.WeakKeyDictionary[Loaded, int]" = weakref.WeakKeyDictionary()
    uses = 0
    loads = 0


def used(program: Loaded) -> None:
    """Note that a program is about to run."""
    _Order.uses += 1
    _Order.programs[program] = _Order.uses


def make_room() -> None:
    """A program is about to be loaded: let others go if there are too many."""
    _Order.loads += 1
    limit = int(config.get("max_loaded_programs"))
    if limit > 0:
        _release(len(_Order.programs) - limit + 1)
    elif _Order.loads % _LOOK_EVERY == 0 and _is_crowded():
        _release(len(_Order.programs) // 2)


def _is_crowded() -> bool:
    try:
        most = int(_MAX_MAPS.read_text(encoding="ascii"))
        taken = _MAPS.read_bytes().count(b"\n")
    except FileNotFoundError:  # another system than Linux, without such a limit
        return False
    return taken > _SHARE * most


def _release(number: int) -> None:
    oldest = sorted(_Order.programs.items(), key=lambda item: item[1])
    for program, _ in oldest[: max(number, 0)]:
        del _Order.programs[program]
        program.release()
        counters.add("ProgramRelease")
