"""`LambdaCallback`: hooks given as functions."""

from __future__ import annotations

from collections.abc import Callable

from xlatrainer.callbacks.callback import Callback

__all__ = ["LambdaCallback"]


class LambdaCallback(Callback):
    """A callback made of functions, one a hook.

    Args:
        **hooks: Functions by the name of the hook they are called for, with that hook's arguments: `(index, logs)`
            for the hooks of epochs and batches, `(logs)` for the others.

    Raises:
        TypeError: If a name is no hook of `Callback`, or a value cannot be called.

    Example:
        >>> callback = LambdaCallback(on_epoch_end=lambda epoch, logs: print(f"epoch {epoch}: {logs['loss']:.2f}"))
        >>> callback.on_epoch_end(0, {"loss": 0.5})
        epoch 0: 0.50
    """

    def __init__(self, **hooks: Callable[..., None]) -> None:
        known = sorted(name for name in vars(Callback) if name.startswith("on_"))
        for name, function in hooks.items():
            if name not in known:
                raise TypeError(f"LambdaCallback got {name!r}, which is no hook; the hooks are {known}")
            if not callable(function):
                raise TypeError(f"LambdaCallback needs a function for {name}, got {function!r}")
            setattr(self, name, function)
