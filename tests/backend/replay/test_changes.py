"""What somebody does to a tensor or a container between two replays is seen, whatever way it is done."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xlatrainer as xla
from xlatrainer.backend import counters
from xlatrainer.backend.replay.snapshot import Snapshot


class State(nn.Module):
    """Two buffers that are written, two that are written and not read, a matrix, options, a set."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b", "c", "d"):
            self.register_buffer(name, torch.ones(3))
        self.register_buffer("matrix", torch.arange(9.0).reshape(3, 3))
        self.options = {"plain": True}
        self.names = frozenset({"plain", "other"})

    def forward(self, x: Tensor) -> Tensor:
        self.a += x
        self.b += 2 * x
        self.c.copy_(x)
        self.d.copy_(3 * x)
        result = self.matrix @ x
        return result + len(self.names) if "plain" in self.options else result * 100


def _share(state: Any, first: str, second: str) -> None:
    setattr(state, first, torch.zeros(3, device=state.matrix.device))
    setattr(state, second, getattr(state, first))


def _share_data(state: Any, first: str, second: str) -> None:
    zeros = torch.zeros(3, device=state.matrix.device)
    getattr(state, first).data = zeros
    getattr(state, second).data = zeros


def _other(state: Any) -> Tensor:
    return torch.arange(9.0).reshape(3, 3).to(state.matrix.device) * 2 - 1


def _matrix(make: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    return lambda state: setattr(state, "matrix", make(_other(state)))


def _set_data(state: Any) -> None:
    state.matrix.data = _other(state).t()


def _rename_option(state: Any) -> None:
    state.options.clear()
    state.options["other"] = True


CHANGES: dict[str, Callable[[Any], Any]] = {
    "two buffers that are read become one": lambda state: _share(state, "a", "b"),
    "two buffers that are read share a storage": lambda state: _share_data(state, "a", "b"),
    "two buffers that are written become one": lambda state: _share(state, "c", "d"),
    "two buffers that are written share a storage": lambda state: _share_data(state, "c", "d"),
    "a buffer that is read and one that is written become one": lambda state: _share(state, "a", "c"),
    "another matrix": _matrix(lambda matrix: matrix),
    "a transposed matrix": _matrix(Tensor.t),
    "a negated matrix": _matrix(torch._neg_view),
    "a part of a larger matrix": _matrix(lambda matrix: torch.cat([matrix, matrix + 1])[2:5]),
    "other data in the matrix": _set_data,
    "the matrix transposed in place": lambda state: state.matrix.t_(),
    "an option under another name": _rename_option,
    "attributes of a tensor": lambda state: setattr(state.matrix, "scale", 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    """The function gives, and writes, what the same calls give on the CPU."""
    mine, theirs = State().to("xla"), State()
    step = xla.compile(lambda x: mine(x))
    x = torch.tensor([1.0, 2.0, 3.0])
    for index in range(9):
        if index == 5:
            assert step.step.reason == ""
            CHANGES[name](mine)
            CHANGES[name](theirs)
        assert torch.equal(step(x.to("xla")).cpu(), theirs(x))
        for (key, one), two in zip(mine.named_buffers(), theirs.buffers(), strict=True):
            assert torch.equal(one.cpu(), two), key
    assert step.step.reason == ""


def test_arguments_that_are_one_tensor_are_replayed() -> None:
    """What is only read may be shared."""
    add = xla.compile(lambda x, y: x - 2 * y)
    x, y = torch.ones(3).to("xla"), torch.ones(3).to("xla") * 3
    for _ in range(4):
        add(x, y)
    assert add(x, x).tolist() == [-1.0, -1.0, -1.0]
    assert add.step.reason == ""


class Restarted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3, device="xla")
        self.scale = torch.ones(3, device="xla")

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x * self.scale
        return self.total * 1


def test_a_sum_that_starts_anew_needs_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new tensor of the same kind in the place of a tensor: the state is not walked through for it."""
    model = Restarted()
    step = xla.compile(lambda x: model(x))
    x = torch.ones(3).to("xla")
    for _ in range(4):
        step(x)
    walks = []
    walk = Snapshot._walk
    monkeypatch.setattr(Snapshot, "_walk", lambda self: (walks.append(1), walk(self)))
    for _ in range(3):
        model.total = torch.zeros(3, device="xla")
        assert step(x).tolist() == [1.0, 1.0, 1.0]
        assert step(x).tolist() == [2.0, 2.0, 2.0]
        assert step.step.reason == ""
    assert not walks


def test_a_new_tensor_is_watched() -> None:
    """What happens to a tensor that was put into a place is seen as well."""
    model = Restarted()
    step = xla.compile(lambda x: model(x))
    x = torch.ones(3).to("xla")
    for _ in range(4):
        step(x)
    for change in (
        lambda: model.total.requires_grad_(),
        lambda: setattr(model.total, "note", 1),
        lambda: setattr(model, "total", torch.zeros(3, device="xla").requires_grad_()),
    ):
        model.total = torch.zeros(3, device="xla")
        for _ in range(4):
            step(x)
        model.total = torch.zeros(3, device="xla")
        xla.sync()
        assert step.step._snapshot.adopt()  # as the next call would
        change()
        ends = counters.value("ReplayEnd")
        step(x)
        assert counters.value("ReplayEnd") == ends + 1
