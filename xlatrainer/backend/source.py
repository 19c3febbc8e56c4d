"""The user's line: where in the user's code an operator was recorded.

Looked up only when a trace leaves the known paths (see `ir`), so a steady loop pays nothing for it.

May import: _private_api.
"""

import os
import sys
import sysconfig
import threading
from types import FrameType, ModuleType

import jax
import torch

from xlatrainer.backend._private_api import module_of_call

__all__ = ["is_own_code", "module_path", "user_line", "user_stack"]


def _folder(module: ModuleType) -> str:
    return os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep


_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    _folder(torch),
    _folder(jax),
    "<frozen ",
)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep


def _is_users(filename: str) -> bool:
    if filename.startswith(_LIBRARIES):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or _INSTALLED in filename


def is_own_code(filename: str) -> bool:
    """Whether a file is the user's own, and not of an installed library."""
    return _is_users(filename) and _INSTALLED not in filename


def _first_outside(frame: FrameType | None) -> str | None:
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return None


def user_line() -> str:
    """`file:line in function` of the innermost caller outside torch, jax, the standard library and this package.

    The backward pass runs on a thread of autograd's, without frames of the user's: then it is the line that the main
    thread stands at, which is the call of `backward()`.
    """
    here = _first_outside(sys._getframe(1))
    if here is not None:
        return here
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    there = _first_outside(frame)
    return f"{there} (backward)" if there is not None else "unknown line"


def user_stack() -> str:
    """All of the user's lines that the call came through, the innermost first, joined by ` <- `."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " <- ".join(lines) or user_line()


def module_path() -> list[str]:
    """The modules whose forward passes the call came through, the outermost first.

    The first by its class, each further one by its name in the one before it, or by its class if it has none there.
    """
    called: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = module_of_call(frame)
        if module is not None:
            called.append(module)
        frame = frame.f_back
    called.reverse()
    return [_name_within(outer, module) for outer, module in zip([None, *called], called, strict=False)]


def _name_within(outer: torch.nn.Module | None, module: torch.nn.Module) -> str:
    named = () if outer is None else outer.named_modules()
    return next((name for name, inner in named if inner is module and name), type(module).__name__)
