"""A replayed step and a run of much memory before it: which waits for which, and what happens meanwhile."""

import threading

import pytest
import torch
from torch import Tensor

import xlatrainer as xla
from xlatrainer.backend import counters, program
from xlatrainer.backend.replay import step as replay_step
from xlatrainer.backend.state import state as device_state


def test_what_another_thread_does_while_a_step_waits_for_large_memory_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.ones(3, device="xla")
    replayed = counters.value("Replay")

    @xla.compile
    def step() -> Tensor:
        weight.add_(1)
        return weight.sum()

    for _ in range(3):
        step()

    def wait_while_another_thread_goes_on() -> None:
        for change in (lambda: weight.mul_(10), lambda: weight.copy_(weight.cpu() + 5)):
            thread = threading.Thread(target=change)
            thread.start()
            thread.join()

    monkeypatch.setattr(replay_step, "let_large_run_end", wait_while_another_thread_goes_on)
    assert step().item() == 3 * ((1 + 3) * 10 + 5 + 1)
    assert counters.value("Replay") == replayed + 2


def test_a_replay_waits_for_large_memory_to_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LARGE", 100_000)  # of bytes
    weight = torch.eye(256, device="xla")

    @xla.compile
    def step() -> Tensor:
        weight.copy_(weight @ weight + weight @ (weight + 1))
        return weight.sum()

    step()
    for _ in range(4):
        pending = device_state.large_run
        assert pending is not None
        step()
        assert pending.is_ready()
        assert device_state.large_run is not pending
