"""Packages that only some features need: the error that says how to get them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["require"]


def require(module: str, needed_by: str, install: str) -> Any:
    """The module, imported.

    Args:
        module: Its name, such as "torch.utils.tensorboard".
        needed_by: Who needs it, for the message.
        install: The command that installs it.

    Raises:
        ImportError: If it is not installed, or cannot be imported; the message says what to do.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs the package {module!r}, which cannot be imported ({error}): {install}"
        ) from error
