"""Indices out of range: what CPU torch raises at the call is raised here when something is read, never a number."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import xlatrainer as xla
from xlatrainer import config
from xlatrainer.backend import counters
from xlatrainer.backend.state import state

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _rows(index: torch.Tensor) -> torch.Tensor:
    return index.unsqueeze(1).expand(-1, 4)


# Called with a 5 x 4 tensor and three indices into its first dim.
CALLS: dict[str, Call] = {
    "index": lambda t, i: t[i],
    "index_put": lambda t, i: t.index_put((i,), torch.zeros((), device=t.device)),
    "index_select": lambda t, i: t.index_select(0, i),
    "index_add": lambda t, i: t.index_add(0, i, torch.ones(3, 4, device=t.device)),
    "index_copy": lambda t, i: t.index_copy(0, i, torch.ones(3, 4, device=t.device)),
    "index_fill": lambda t, i: t.index_fill(0, i, 1.0),
    "gather": lambda t, i: t.gather(0, _rows(i)),
    "scatter": lambda t, i: t.scatter(0, _rows(i), 1.0),
    "scatter_add": lambda t, i: t.scatter_add(0, _rows(i), torch.ones(3, 4, device=t.device)),
    "take": lambda t, i: t.take(i * 4),
    "embedding": lambda t, i: functional.embedding(i, t),
    "nll_loss": lambda t, i: functional.nll_loss(t.t()[:3], i),
    "cross_entropy": lambda t, i: functional.cross_entropy(t.t()[:3], i),
}
NEGATIVE_IS_RIGHT = {"index", "index_put", "index_fill", "take"}


def _outcome(call: Call, device: str, index: list[int]) -> torch.Tensor | type[Exception]:
    tensor = torch.arange(20.0).reshape(5, 4).to(device)
    try:
        return call(tensor, torch.tensor(index).to(device)).cpu()
    except (IndexError, RuntimeError) as error:
        return type(error)


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("index", [[0, 4, 2], [0, 5, 1], [1, -1, 0], [0, 1, -6]])
def test_the_outcome_is_the_cpus(name: str, index: list[int]) -> None:
    expected, result = (_outcome(CALLS[name], device, index) for device in ("cpu", "xla"))
    if isinstance(expected, torch.Tensor):
        assert isinstance(result, torch.Tensor), result
        torch.testing.assert_close(result, expected)
    else:
        assert result is expected
    assert isinstance(_outcome(CALLS[name], "xla", [0, 1, 2]), torch.Tensor)  # the device goes on


def test_the_error_names_index_operator_and_line() -> None:
    table = torch.ones(5, 4, device="xla")
    found = functional.embedding(torch.tensor([1, 7, 9]).to("xla"), table)
    pattern = (
        r"index 7 out of range in self.*5 rows.*aten::embedding, recorded at .*test_checks.py:\d+ in test_the_error"
    )
    with pytest.raises(IndexError, match=pattern):
        found.sum().item()


def test_ignored_targets_are_right() -> None:
    scores = torch.randn(3, 5)
    for target in (torch.tensor([0, -100, 4]), torch.tensor([-100, -100, 1])):
        result = functional.cross_entropy(scores.to("xla"), target.to("xla"))
        torch.testing.assert_close(result.cpu(), functional.cross_entropy(scores, target))


def test_a_step_that_nobody_reads_fails_at_the_next_sync() -> None:
    table = torch.nn.Parameter(torch.ones(5, 4).to("xla"))
    functional.embedding(torch.tensor([5]).to("xla"), table).sum().backward()
    with torch.no_grad():
        table -= 1
    xla.sync()
    with pytest.raises(IndexError, match="index 5 out of range"):
        xla.wait_device_ops()
    xla.sync()
    assert not state.checks


def test_checks_cost_no_execution_and_no_transfer() -> None:
    table = torch.ones(5, 4, device="xla")
    index = torch.tensor([1, 2]).to("xla")
    xla.sync()
    before = counters.snapshot()
    functional.embedding(index, table).sum().item()
    after = counters.snapshot()
    changed = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    reading = {"TransferFromDevice": 1, "sync::_local_scalar_dense": 1}
    assert changed == {"UncachedCompile": 1, "Execute": 1, **reading}


def test_one_switch_turns_them_off() -> None:
    with config.override(check_indices="off"):
        state.forget_programs()
        state.new_trace()
        table = torch.ones(5, 4).to("xla")
        assert functional.embedding(torch.tensor([9]).to("xla"), table).sum().item() == 4
    state.forget_programs()
    state.new_trace()


def test_of_calls_that_are_alike_the_one_that_fails_is_named() -> None:
    table = torch.zeros(5, 4, device="xla")
    right, wrong = torch.tensor([1, 2]).to("xla"), torch.tensor([1, 9]).to("xla")
    xla.sync()
    total = functional.embedding(right, table)
    total = total + _looked_up(wrong, table)
    total = total + functional.embedding(right, table)
    with pytest.raises(IndexError, match=r"index 9 out of range in self.*aten::embedding, recorded at .*in _looked_up"):
        total.cpu()


def _looked_up(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return functional.embedding(index, table)
