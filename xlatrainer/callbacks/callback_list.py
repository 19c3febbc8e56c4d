"""`CallbackList`: calls each hook of each callback, in order, from one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from xlatrainer.callbacks.callback import Callback, LogValues

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["CallbackList", "Hook"]

Hook = Literal[
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_end",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_predict_begin",
    "on_predict_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
]

_NO_LOGS: LogValues = MappingProxyType({})


class CallbackList:
    """The callbacks of one `fit`, `evaluate` or `predict`.

    Args:
        callbacks: Called in this order: the user's first, then those the Trainer adds (history, progress), as in Keras.
        trainer: Given to each callback.
        params: Given to each callback, see `Callback.params`.

    Raises:
        TypeError: If an item is not a `Callback` object.
        ValueError: If the same object is there twice.
    """

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer, params: Mapping[str, Any]) -> None:
        self._callbacks = tuple(callbacks)
        for position, callback in enumerate(self._callbacks):
            if not isinstance(callback, Callback):
                hint = "; create an object of it" if isinstance(callback, type) else ""
                raise TypeError(f"callbacks must be Callback objects; number {position} is {callback!r}{hint}")
            if any(callback is other for other in self._callbacks[:position]):
                raise ValueError(
                    f"the {type(callback).__name__} callback is given twice and would be called twice; "
                    f"pass it to Trainer or to fit, not to both"
                )
        for callback in self._callbacks:
            callback.set_trainer(trainer)
            callback.set_params(params)

    def call(self, hook: Hook, *index: int, logs: LogValues = _NO_LOGS) -> None:
        """Call `hook` on every callback; `index` is the epoch or batch for the hooks that have one."""
        for callback in self._callbacks:
            getattr(callback, hook)(*index, logs)
