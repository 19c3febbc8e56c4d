"""Step closures: when they run, with which values, on which thread, and where their errors come out."""

import subprocess
import sys
import textwrap
import threading
import traceback
from typing import Any

import pytest
import torch

import xlatrainer as xla
from tests.trainer.helpers import DEVICES, class_batches, classifier, strategy_on
from xlatrainer import config
from xlatrainer.backend import closures, counters
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.trainer.trainer import Trainer


class Failure(Exception):
    """What the closures here raise."""


def fail(text: str = "failed") -> None:
    raise Failure(text)


def counted() -> dict[str, int]:
    names = ("Execute", "UncachedCompile", "TransferFromDevice")
    return {name: counters.value(name) for name in names}


def since(before: dict[str, int]) -> dict[str, int]:
    return {name: counters.value(name) - count for name, count in before.items()}


def test_many_closures_are_one_execution_and_one_copy_a_tensor() -> None:
    seen: list[Any] = []
    first, second = (torch.arange(4, device="xla") + offset for offset in (0, 10))
    xla.add_step_closure(lambda *values: seen.append(("a", *values)), args=(first, "text", 3))
    xla.add_step_closure(lambda value: seen.append(("b", value)), args=({"nested": [first, second[1:3]]},))
    xla.add_step_closure(lambda: seen.append(("c",)))
    before = counted()
    assert seen == []
    xla.sync()
    assert since(before) | {"UncachedCompile": 1} == {"Execute": 1, "UncachedCompile": 1, "TransferFromDevice": 2}
    assert [call[0] for call in seen] == ["a", "b", "c"]
    assert seen[0][2:] == ("text", 3)
    assert seen[0][1].device.type == "cpu"
    assert seen[0][1].tolist() == [0, 1, 2, 3]
    assert seen[1][1]["nested"][1].tolist() == [11, 12]
    xla.sync()
    assert len(seen) == 3


@pytest.mark.parametrize("run_async", [False, True])
def test_the_values_are_those_of_the_end_of_the_step(run_async: bool) -> None:
    seen: list[float] = []
    gate = threading.Event()
    value = torch.zeros((), device="xla", requires_grad=True)
    if run_async:
        xla.add_step_closure(gate.wait, run_async=True)
    for _ in range(3):
        xla.add_step_closure(lambda now: seen.append(now.item()), args=(value,), run_async=run_async)
        with torch.no_grad():
            value += 1
        xla.sync()
        with torch.no_grad():
            value += 10
    gate.set()
    closures.wait()
    assert seen == [1, 12, 23]
    assert not value.detach().cpu().requires_grad


def test_asynchronous_ones_run_in_order_on_one_thread_and_the_step_goes_on() -> None:
    seen: list[Any] = []
    gate = threading.Event()

    def note(number: int) -> None:
        gate.wait()
        seen.append((number, threading.current_thread()))

    for number in range(20):
        xla.add_step_closure(note, args=(number,), run_async=True)
        xla.sync()
    assert seen == []
    gate.set()
    closures.wait()
    assert [number for number, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] is not threading.current_thread()


def test_no_more_than_the_limit_wait() -> None:
    gate = threading.Event()
    with config.override(max_async_closures=2):
        for _ in range(3):  # one that runs, and two that wait for it
            xla.add_step_closure(gate.wait, run_async=True)
            xla.sync()
        xla.add_step_closure(lambda: None, run_async=True)
        step = threading.Thread(target=xla.sync)
        step.start()
        step.join(0.05)
        assert step.is_alive()
        gate.set()
        step.join()
    closures.wait()


def test_an_error_is_raised_once_after_the_rest_of_the_queue() -> None:
    seen: list[int] = []
    xla.add_step_closure(fail, args=("first",))
    xla.add_step_closure(seen.append, args=(1,))
    xla.add_step_closure(fail, args=("second",))
    xla.add_step_closure(seen.append, args=(2,))
    with pytest.raises(Failure, match="first") as raised:
        xla.sync()
    assert seen == [1, 2]
    note, other = raised.value.__notes__
    assert "raised by the step closure fail, which was added at" in note
    assert "test_closures.py" in note
    assert "Failure: second" in other
    assert "in fail" in "".join(traceback.format_tb(raised.value.__traceback__))
    xla.sync()


def test_an_asynchronous_error_comes_out_at_the_next_sync_with_its_traceback() -> None:
    seen: list[int] = []
    xla.add_step_closure(fail, run_async=True)
    xla.add_step_closure(seen.append, args=(1,), run_async=True)
    xla.sync()
    closures._queue.worker.wait()
    assert seen == [1]
    xla.add_step_closure(seen.append, args=(2,))
    with pytest.raises(Failure) as raised:
        xla.sync()
    assert seen == [1, 2]
    assert "in fail" in "".join(traceback.format_tb(raised.value.__traceback__))
    xla.sync()


def test_a_closure_may_add_another_and_read_the_device() -> None:
    seen: list[float] = []

    def again(value: torch.Tensor) -> None:
        doubled = value.to("xla") * 2
        seen.append(doubled.item())
        xla.add_step_closure(lambda: seen.append(-1))

    xla.add_step_closure(again, args=(torch.ones((), device="xla"),))
    xla.sync()
    assert seen == [2]
    xla.sync()
    assert seen == [2, -1]


def test_a_step_that_fails_takes_its_closures_along() -> None:
    seen: list[int] = []
    table = torch.arange(3, device="xla")
    wrong = table[torch.tensor([7], device="xla")]
    xla.add_step_closure(lambda value: seen.append(value), args=(wrong,))
    with pytest.raises(IndexError):
        xla.sync()
    assert seen == []


def test_refusals() -> None:
    with pytest.raises(TypeError, match="takes a function, got 3"):
        xla.add_step_closure(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"one argument is args=\(value,\)"):
        xla.add_step_closure(print, args="text")  # type: ignore[arg-type]


def test_a_compiled_step_runs_them_and_one_that_adds_some_is_not_replayed() -> None:
    seen: list[float] = []

    @xla.compile
    def step(value: torch.Tensor) -> torch.Tensor:
        result = value * 3
        xla.add_step_closure(lambda now: seen.append(now.item()), args=(result,))
        return result

    for number in range(5):
        step(torch.tensor(float(number), device="xla"))
    assert seen == [0, 3, 6, 9, 12]
    assert "it adds a step closure at" in step.step.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", DEVICES)
def test_fit_runs_them_after_each_step_and_waits_for_all(device: str) -> None:
    seen: list[Any] = []
    trainer = Trainer(classifier(), "sgd", strategy=strategy_on(device))
    weight = trainer.model[0].weight  # type: ignore[index]

    def add(batch: int, logs: Any) -> None:
        xla.add_step_closure(lambda value: seen.append(("now", batch, value.sum().item())), args=(weight,))
        xla.add_step_closure(
            lambda value: seen.append(("later", batch, value.sum().item())), args=(weight,), run_async=True
        )

    replays = counters.value("Replay")
    trainer.fit(class_batches(rows=96), callbacks=[LambdaCallback(on_train_batch_begin=add)], verbose=0)
    now, later = ([call[1:] for call in seen if call[0] == kind] for kind in ("now", "later"))
    assert now == later
    assert [batch for batch, _ in now] == list(range(6))
    assert len({total for _, total in now}) == 6
    assert now[-1][1] == weight.detach().cpu().sum().item()
    if device == "xla":
        assert counters.value("Replay") - replays == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_a_training_step_may_add_them(device: str, steps_per_execution: int) -> None:
    seen: list[float] = []
    logged: list[float] = []

    class Own(Trainer):
        def training_step(self, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
            xla.add_step_closure(lambda value: seen.append(value.item()), args=(loss,))
            return loss

    note = LambdaCallback(on_epoch_end=lambda epoch, logs: logged.append(logs["loss"]))
    trainer = Own(classifier(), "sgd", strategy=strategy_on(device), steps_per_execution=steps_per_execution)
    trainer.fit(class_batches(rows=96), epochs=2, callbacks=[note], verbose=0)
    assert len(seen) == 12
    assert [sum(seen[:6]) / 6, sum(seen[6:]) / 6] == pytest.approx(logged, rel=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_a_closure_ends_the_fit_after_its_step(device: str) -> None:
    def add(batch: int, logs: Any) -> None:
        if batch == 2:
            xla.add_step_closure(fail)

    trainer = Trainer(classifier(), "sgd", strategy=strategy_on(device))
    with pytest.raises(Failure) as raised:
        trainer.fit(class_batches(rows=96), callbacks=[LambdaCallback(on_train_batch_begin=add)], verbose=0)
    assert trainer.step == 3
    assert "the training ended in epoch 0 (counted from 0) after 3 of its batches, step 3" in raised.value.__notes__


@pytest.mark.parametrize("device", DEVICES)
def test_evaluate_and_predict_run_them_after_each_batch(device: str) -> None:
    seen: list[Any] = []

    def add(batch: int, logs: Any) -> None:
        seen.append(batch)
        xla.add_step_closure(seen.append, args=("closure",))

    trainer = Trainer(classifier(), "sgd", strategy=strategy_on(device))
    callback = LambdaCallback(on_test_batch_begin=add, on_predict_batch_begin=add)
    trainer.evaluate(class_batches(rows=32), callbacks=[callback], verbose=0)
    trainer.predict(torch.zeros(40, 8), callbacks=[callback], verbose=0)
    assert seen == [0, "closure", 1, "closure"] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_fit_raises_the_error_of_the_last_closure(device: str) -> None:
    trainer = Trainer(classifier(), "sgd", strategy=strategy_on(device))
    add = LambdaCallback(on_epoch_end=lambda epoch, logs: xla.add_step_closure(fail, run_async=True))
    with pytest.raises(Failure) as raised:
        trainer.fit(class_batches(rows=16), callbacks=[add], verbose=0)
    assert "raised by the step closure fail" in raised.value.__notes__[0]


def run_program(body: str) -> subprocess.CompletedProcess[str]:
    program = "import sys, time, torch, xlatrainer as xla\n" + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)


def test_the_end_of_the_process() -> None:
    """Asynchronous closures still run, an error that nobody saw is shown, and so is a closure that never ran."""
    done = run_program(
        """
        def fail():
            raise RuntimeError("too late to be raised")

        xla.add_step_closure(time.sleep, args=(0.2,), run_async=True)
        xla.add_step_closure(fail, run_async=True)
        xla.add_step_closure(print, args=("done",), run_async=True)
        xla.sync()
        xla.add_step_closure(print, args=("never",))
        """
    )
    assert done.stdout.split() == ["done"]
    assert "RuntimeError: too late to be raised" in done.stderr
    assert "in fail" in done.stderr
    assert "did not run: no xla.sync() came after it" in done.stderr
    assert done.returncode == 0
