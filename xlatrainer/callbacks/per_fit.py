"""`PerFitCallback`: a callback that starts anew in each `fit`, unless its state was loaded from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xlatrainer.callbacks.callback import Callback, LogValues

__all__ = ["PerFitCallback"]


class PerFitCallback(Callback):
    """Base of the callbacks that count over the epochs of one `fit`.

    A subclass sets its state in `reset`, which `on_train_begin` calls. State that was loaded from a checkpoint, before
    the `fit` or as a part of its beginning, is kept.
    """

    _is_loaded = False

    def reset(self) -> None:
        """Set the state to what it is before the first epoch."""

    def on_train_begin(self, logs: LogValues) -> None:
        if not self._is_loaded:
            self.reset()

    def on_train_end(self, logs: LogValues) -> None:
        self._is_loaded = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._is_loaded = True
        for name, value in state.items():
            setattr(self, name, value)
