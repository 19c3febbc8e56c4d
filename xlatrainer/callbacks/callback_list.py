"""`CallbackList`: calls each hook of each callback, in order, from one place."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from xlatrainer.callbacks.callback import Callback, LogValues

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["CallbackList", "Hook", "stateful_callbacks"]

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
    "on_preempt",
]


class CallbackList:
    """The callbacks of one `fit`, `evaluate` or `predict`.

    An exception of a hook goes on to the caller as it is, with a note that names the callback and the hook.

    Args:
        callbacks: Called in this order: the user's first, then those the Trainer adds (history, progress), as in Keras;
            those that say `runs_last` at the end.
        trainer: Given to each callback.
        params: Given to each callback, see `Callback.params`.

    Raises:
        TypeError: If an item is not a `Callback` object.
        ValueError: If the same object is there twice.

    Attributes:
        callbacks: The callbacks, in order.
    """

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer, params: Mapping[str, Any]) -> None:
        self.callbacks = tuple(callbacks)
        self._in_training: list[Callback] = []
        self._epoch_logs: LogValues = {}
        for position, callback in enumerate(self.callbacks):
            if not isinstance(callback, Callback):
                hint = "; create an object of it" if isinstance(callback, type) else ""
                raise TypeError(f"callbacks must be Callback objects; number {position} is {callback!r}{hint}")
            if any(callback is other for other in self.callbacks[:position]):
                raise ValueError(
                    f"the {type(callback).__name__} callback is given twice and would be called twice; "
                    f"pass it to Trainer or to fit, not to both"
                )
        self.callbacks = tuple(sorted(self.callbacks, key=lambda callback: callback.runs_last))
        # An `evaluate` in a hook of a `fit` calls the Trainer's callbacks, which then go on with the fit.
        self._outer_params = [(each, each.params) for each in self.callbacks if each.num_calls]
        for callback in self.callbacks:
            callback.set_trainer(trainer)
            callback.set_params(params)

    def call(self, hook: Hook, *index: int, logs: LogValues | None = None) -> None:
        """Call `hook` on every callback; `index` is the epoch or batch for the hooks that have one."""
        logs = {} if logs is None else logs
        if hook == "on_epoch_end":
            self._epoch_logs = logs
        # Those that save do so before others put the best or averaged weights into the model.
        order = (
            sorted(self.callbacks, key=lambda each: not each.runs_last) if hook == "on_train_end" else self.callbacks
        )
        for callback in order:
            if hook == "on_train_end":
                if callback not in self._in_training:
                    continue
                self._in_training.remove(callback)
            _call(callback, hook, *index, logs)
            if hook == "on_train_begin":
                self._in_training.append(callback)

    def saved(self, path: str | os.PathLike[str]) -> None:
        """Call `on_save(path)` on every callback."""
        for callback in self.callbacks:
            _call(callback, "on_save", path)

    def loaded(self, path: str | os.PathLike[str]) -> None:
        """Call `on_load(path)` on every callback."""
        for callback in self.callbacks:
            _call(callback, "on_load", path)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A context for the whole of a `fit`, `evaluate` or `predict`: tells the callbacks how it ends, if badly.

        After an exception every callback has its `on_exception`, and those in training have their `on_train_end`, with
        the logs of the last whole epoch. What fails meanwhile is noted on the exception, which then goes on.
        """
        for callback in self.callbacks:
            callback.num_calls += 1
        try:
            yield
        except BaseException as error:
            for callback in self.callbacks:
                _clean_up(error, callback, "on_exception", error)
            while self._in_training:
                callback = self._in_training.pop(0)
                _clean_up(error, callback, "on_train_end", self._epoch_logs)
            raise
        finally:
            for callback in self.callbacks:
                callback.num_calls -= 1
            for callback, outer in self._outer_params:
                callback.set_params(outer)


def stateful_callbacks(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """The callbacks that have a state to save, by class name; a second one of a class is "EarlyStopping.1".

    Example:
        >>> class Counting(Callback):
        ...     def state_dict(self):
        ...         return {"count": 1}
        >>> list(stateful_callbacks([Counting(), Callback(), Counting()]))
        ['Counting', 'Counting.1']
    """
    seen: Counter[str] = Counter()
    found: dict[str, Callback] = {}
    for callback in callbacks:
        if type(callback).state_dict is Callback.state_dict:
            continue
        name = type(callback).__name__
        found[f"{name}.{seen[name]}" if seen[name] else name] = callback
        seen[name] += 1
    return found


def _call(callback: Callback, hook: str, *arguments: Any) -> None:
    try:
        getattr(callback, hook)(*arguments)
    except BaseException as error:
        error.add_note(f"raised by the callback {type(callback).__name__}, in {hook}")
        raise


def _clean_up(error: BaseException, callback: Callback, hook: str, argument: Any) -> None:
    try:
        _call(callback, hook, argument)
    except Exception as second:  # noqa: BLE001 - noted on the exception that is raised anyway
        notes = "; ".join(getattr(second, "__notes__", []))
        error.add_note(f"and while the call was being ended: {type(second).__name__}: {second} ({notes})")
