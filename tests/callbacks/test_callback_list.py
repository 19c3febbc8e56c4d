"""The order of hooks and callbacks, as in Keras, and what a hook is given."""

import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.helpers import DEVICES, ON_CPU, class_batches, classifier, strategy_on
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.callback_list import CallbackList, Hook, stateful_callbacks
from xlatrainer.callbacks.history import History
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.progbar_logger import ProgbarLogger
from xlatrainer.trainer.trainer import Trainer

HOOKS = sorted(set(typing.get_args(Hook)) | {"on_batch_begin", "on_batch_end"})
BATCH_ALIASES = ("on_batch_begin", "on_batch_end")


class Recorder(Callback):
    """Notes every hook with its index and the names in its logs."""

    def __init__(self, calls: list[Any], label: str = "") -> None:
        for name in HOOKS:
            if name not in BATCH_ALIASES:
                setattr(self, name, self._noting(calls, f"{label}{name}"))

    @staticmethod
    def _noting(calls: list[Any], name: str) -> Any:
        return lambda *arguments: calls.append((name, *arguments[:-1], list(arguments[-1])))


def trainer(*callbacks: Callback) -> Trainer:
    return Trainer(classifier(), "sgd", metrics=["accuracy"], callbacks=callbacks, strategy=ON_CPU)


def test_the_order_of_fit() -> None:
    calls: list[Any] = []
    trainer(Recorder(calls)).fit(class_batches(rows=32), epochs=2, validation_data=class_batches(rows=16), verbose=0)
    values = ["loss", "accuracy"]
    epoch_values = [*values, "val_loss", "val_accuracy"]

    def epoch(number: int) -> list[Any]:
        return [
            ("on_epoch_begin", number, []),
            ("on_train_batch_begin", 0, []),
            ("on_train_batch_end", 0, values),
            ("on_train_batch_begin", 1, []),
            ("on_train_batch_end", 1, values),
            ("on_test_begin", []),
            ("on_test_batch_begin", 0, []),
            ("on_test_batch_end", 0, values),
            ("on_test_end", values),
            ("on_epoch_end", number, epoch_values),
        ]

    assert calls == [("on_train_begin", []), *epoch(0), *epoch(1), ("on_train_end", epoch_values)]


def test_the_order_of_evaluate_and_predict() -> None:
    calls: list[Any] = []
    under_test = trainer(Recorder(calls))
    under_test.evaluate(class_batches(rows=16), verbose=0)
    under_test.predict(torch.randn(3, 8), verbose=0)
    assert calls == [
        ("on_test_begin", []),
        ("on_test_batch_begin", 0, []),
        ("on_test_batch_end", 0, ["loss", "accuracy"]),
        ("on_test_end", ["loss", "accuracy"]),
        ("on_predict_begin", []),
        ("on_predict_batch_begin", 0, []),
        ("on_predict_batch_end", 0, []),
        ("on_predict_end", []),
    ]


def test_the_trainers_callbacks_come_first_then_fits_then_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    for default in (History, ProgbarLogger):
        note = Recorder._noting(calls, default.__name__)
        monkeypatch.setattr(default, "on_epoch_end", lambda self, epoch, logs, note=note: note(epoch, logs))
    first, second = (LambdaCallback(on_epoch_end=Recorder._noting(calls, label)) for label in ("first", "second"))
    trainer(first).fit(class_batches(rows=16), callbacks=[second], verbose=2)
    assert [call[0] for call in calls] == ["first", "second", "History", "ProgbarLogger"]


def test_the_keras_aliases_of_batch_hooks() -> None:
    calls: list[Any] = []
    aliases = LambdaCallback(**{name: Recorder._noting(calls, name) for name in BATCH_ALIASES})
    trainer(aliases).fit(class_batches(rows=16), verbose=0)
    assert calls == [("on_batch_begin", 0, []), ("on_batch_end", 0, ["loss", "accuracy"])]


def test_what_a_callback_is_given() -> None:
    callback = Callback()
    under_test = trainer(callback)
    under_test.fit(class_batches(rows=20), epochs=3, verbose=0)
    assert callback.trainer is under_test
    assert callback.model is under_test.model
    assert callback.params == {"epochs": 3, "steps": 2, "verbose": 0}


def test_logs_hold_the_epoch_so_far() -> None:
    seen: list[float] = []
    under_test = trainer(LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])))
    history = under_test.fit(class_batches(), verbose=0)
    assert seen[-1] == history.history["loss"][-1]
    assert len(set(seen)) == len(seen)


def test_refusals() -> None:
    callback = Callback()
    with pytest.raises(TypeError, match="number 0 is <class .*History'>; create an object of it"):
        trainer(History).fit(class_batches(), verbose=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the Callback callback is given twice"):
        trainer(callback).fit(class_batches(), callbacks=[callback], verbose=0)


class Ending(Callback):
    """Notes how it is ended, and fails in a hook of choice."""

    def __init__(self, calls: list[Any], label: str, fails_in: str = "") -> None:
        self.calls = calls
        self.label = label
        if fails_in:
            setattr(self, fails_in, self._fail)

    def _fail(self, *arguments: Any) -> None:
        raise OSError(f"no space left for {self.label}")

    def on_exception(self, error: BaseException) -> None:
        self.calls.append((self.label, "on_exception", str(error)))

    def on_train_end(self, logs: Any) -> None:
        self.calls.append((self.label, "on_train_end", list(logs)))


def run(callbacks: CallbackList, *calls: tuple[Any, ...], error: BaseException | None = None) -> None:
    """Call hooks as a `fit` does, in which `error` happens at the end."""
    with callbacks.guarded():
        for hook, *index in calls:
            callbacks.call(hook, *index, logs={"loss": 0.5} if "end" in hook else {})
        if error is not None:
            raise error


@pytest.mark.parametrize("hook", sorted({*typing.get_args(Hook)} - {"on_train_begin", "on_train_end"}))
def test_an_exception_of_a_callback_ends_the_call_and_all_are_told(hook: str) -> None:
    calls: list[Any] = []
    callbacks = CallbackList([Ending(calls, "a"), Ending(calls, "b", hook), Ending(calls, "c")], trainer(), {})
    index = [0] if "batch" in hook or "epoch" in hook else []
    with pytest.raises(OSError, match="no space left for b") as raised:
        run(callbacks, ("on_train_begin",), (hook, *index))
    assert raised.value.__notes__ == [f"raised by the callback Ending, in {hook}"]
    error = "no space left for b"
    assert calls == [
        *((label, "on_exception", error) for label in "abc"),
        *((label, "on_train_end", ["loss"] if hook == "on_epoch_end" else []) for label in "abc"),
    ]


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_batch_end", "on_test_batch_begin", "on_train_begin"])
def test_fit_ends_so(hook: str) -> None:
    calls: list[Any] = []
    under_test = trainer(Ending(calls, "a"), Ending(calls, "b", hook), Ending(calls, "c"))
    with pytest.raises(OSError, match="no space left for b") as raised:
        under_test.fit(class_batches(rows=16), validation_data=class_batches(rows=16), verbose=0)
    assert raised.value.__notes__[0] == f"raised by the callback Ending, in {hook}"
    assert [call[0] for call in calls if call[1] == "on_exception"] == ["a", "b", "c"]
    ended = ["a"] if hook == "on_train_begin" else ["a", "b", "c"]
    assert [call[0] for call in calls if call[1] == "on_train_end"] == ended
    assert under_test.model.training


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_evaluate_and_predict_tell_the_callbacks(name: str) -> None:
    calls: list[Any] = []
    hook = "on_test_batch_end" if name == "evaluate" else "on_predict_batch_end"
    under_test = trainer(Ending(calls, "a"), Ending(calls, "b", hook))
    with pytest.raises(OSError, match="no space left for b"):
        getattr(under_test, name)(class_batches(rows=16), verbose=0)
    assert [call[:2] for call in calls] == [("a", "on_exception"), ("b", "on_exception")]
    assert under_test.model.training


class Looks(Callback):
    """Evaluates and predicts in every batch and epoch, as one that validates by steps does."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.epochs: set[Any] = set()

    def look(self) -> None:
        self.epochs.add(self.params["epochs"])
        self.seen.append(self.trainer.evaluate(class_batches(rows=32, seed=9), verbose=0)["loss"])
        self.trainer.predict(torch.zeros(3, 8), verbose=0)
        self.trainer.test_on_batch(*class_batches(seed=8)[0])
        self.trainer.predict_on_batch(torch.zeros(3, 8))

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self.look()

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.look()


@pytest.mark.parametrize("device", DEVICES)
def test_an_evaluation_within_an_epoch_leaves_the_training_as_it_was(device: str) -> None:
    fit: Any = {"x": class_batches(), "epochs": 3, "validation_data": class_batches(rows=32), "verbose": 0}
    arguments: Any = {"metrics": ["accuracy"], "strategy": strategy_on(device)}
    expected = Trainer(classifier(), "sgd", **arguments).fit(**fit).history
    looks = Looks()
    under_test = Trainer(classifier(), "sgd", **arguments, callbacks=[looks])
    assert under_test.fit(**fit).history == expected
    assert len(set(looks.seen)) == 3 * 7  # the last batch's and the epoch's are the same
    assert looks.epochs == {3}
    assert looks.params["epochs"] == 3


def test_on_train_end_runs_once_whatever_fails() -> None:
    calls: list[Any] = []
    callbacks = CallbackList(
        [Ending(calls, "a"), Ending(calls, "b", "on_train_end"), Ending(calls, "c")], trainer(), {}
    )
    with pytest.raises(OSError, match="for b"):
        run(callbacks, ("on_train_begin",), ("on_epoch_end", 0), ("on_train_end",))
    assert [call for call in calls if call[1] == "on_train_end"] == [
        ("a", "on_train_end", ["loss"]),
        ("c", "on_train_end", ["loss"]),
    ]


def test_who_has_not_begun_is_not_ended() -> None:
    calls: list[Any] = []
    callbacks = CallbackList(
        [Ending(calls, "a"), Ending(calls, "b", "on_train_begin"), Ending(calls, "c")], trainer(), {}
    )
    with pytest.raises(OSError, match="for b"):
        run(callbacks, ("on_train_begin",))
    assert [call[0] for call in calls if call[1] == "on_train_end"] == ["a"]


def test_what_fails_during_the_clean_up_is_noted() -> None:
    calls: list[Any] = []
    callbacks = CallbackList([Ending(calls, "a", "on_exception"), Ending(calls, "b", "on_train_end")], trainer(), {})
    with pytest.raises(KeyboardInterrupt) as raised:
        run(callbacks, ("on_train_begin",), error=KeyboardInterrupt())
    first, second = raised.value.__notes__
    assert "OSError: no space left for a (raised by the callback Ending, in on_exception)" in first
    assert "OSError: no space left for b (raised by the callback Ending, in on_train_end)" in second
    assert ("a", "on_train_end", []) in calls


def test_saving_and_loading_are_told_with_the_path() -> None:
    calls: list[Any] = []
    note = LambdaCallback(
        on_save=lambda path: calls.append(("saved", path)), on_load=lambda path: calls.append(("loaded", path))
    )
    callbacks = CallbackList([note], trainer(), {})
    callbacks.saved(Path("a"))
    callbacks.loaded(Path("b"))
    assert calls == [("saved", Path("a")), ("loaded", Path("b"))]


def test_the_names_of_states() -> None:
    class Counting(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

    first, second = Counting(), Counting()
    assert stateful_callbacks([first, Callback(), second]) == {"Counting": first, "Counting.1": second}
    assert Callback().state_dict() == {}
    Callback().load_state_dict({})
