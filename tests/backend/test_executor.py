"""What runs when: programs, executions, transfers, donation and memory, counted exactly."""

import gc
import resource
from typing import Any

import pytest
import torch
from torch.nn import functional

import xlatrainer as xla
from xlatrainer import config
from xlatrainer.backend import counters, program
from xlatrainer.backend.lowerings.registry import find
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import storage_data, value_of
from xlatrainer.errors import ExecutionError, LostValueError, LoweringError

Counts = dict[str, int]


class Counted:
    """Counters of what the device did since the block began; `MarkStep` counts what it was asked to do."""

    def __enter__(self) -> "Counted":
        self.before = counters.snapshot()
        return self

    def __exit__(self, *_: object) -> None:
        self.counts = {
            n: c - self.before.get(n, 0)
            for n, c in counters.snapshot().items()
            if c != self.before.get(n, 0) and n != "MarkStep"
        }


def test_nothing_runs_until_something_is_read() -> None:
    source = torch.randn(4).to("xla")
    xla.sync()
    with Counted() as counted:
        result = (source * 2).cos() + 1
        for _ in range(10):
            result = result * 0.5
    assert counted.counts == {}
    with Counted() as counted:
        result.cpu()
    assert counted.counts == {"UncachedCompile": 1, "Execute": 1, "TransferFromDevice": 1}
    with Counted() as counted:
        result.cpu()
    assert counted.counts == {"TransferFromDevice": 1}


def test_two_results_of_one_input_are_one_program() -> None:
    source = torch.ones(3, device="xla")
    xla.sync()
    with Counted() as counted:
        cos, sin = source.cos(), source.sin()
        xla.sync()
    assert counted.counts == {"UncachedCompile": 1, "Execute": 1}
    torch.testing.assert_close(cos.cpu() ** 2 + sin.cpu() ** 2, torch.ones(3))


def test_sync_with_nothing_pending_does_nothing() -> None:
    xla.sync()
    with Counted() as counted:
        xla.sync()
        xla.sync(wait=True)
        xla.wait_device_ops()
    assert counted.counts == {}


def test_what_nobody_can_read_is_not_run() -> None:
    source = torch.ones(3, device="xla")
    xla.sync()
    with Counted() as counted:
        source.exp()
        xla.sync()
    assert counted.counts == {}


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, batch: int = 8) -> None:
    for _ in range(steps):
        inputs, targets = torch.randn(batch, 6).to("xla"), torch.randint(0, 3, (batch,)).to("xla")
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        xla.sync()


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).to("xla")


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_equal_steps_compile_at_most_twice(name: str) -> None:
    model = _model()
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    xla.sync()
    with Counted() as counted:
        _train(model, optimizer, 10)
    assert counted.counts["UncachedCompile"] <= 2
    assert counted.counts["Execute"] == 10
    assert counted.counts["TransferToDevice"] == 20
    assert not [name for name in counted.counts if name.startswith("aten::")]
    with Counted() as counted:
        _train(model, optimizer, 5)
    assert counted.counts == {"CachedCompile": 5, "Execute": 5, "TransferToDevice": 10}


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_changing_learning_rate_does_not_recompile(name: str) -> None:
    model = _model()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    _train(model, optimizer, 2)
    with Counted() as counted:
        for _ in range(10):
            _train(model, optimizer, 1)
            schedule.step()
    assert "UncachedCompile" not in counted.counts


def test_numbers_that_change_do_not_recompile() -> None:
    source = torch.ones(3).to("xla")
    (source * 2.0 + 1).cpu()
    with Counted() as counted:
        for step in range(1, 6):
            result = source * (0.1 * step) + step
            torch.testing.assert_close(result.cpu(), torch.full((3,), 0.1 * step + step))
    assert "UncachedCompile" not in counted.counts


def test_another_batch_size_is_one_more_program() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, 2)
    with Counted() as counted:
        for batch in (5, 8, 5, 8, 5):
            _train(model, optimizer, 1, batch)
    assert counted.counts["UncachedCompile"] == 1


def test_old_parameters_are_donated() -> None:
    weight = torch.nn.Parameter(torch.zeros(256, 256).to("xla"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(3):
        weight.grad = torch.ones(256, 256, device="xla")
        old = value_of(weight).buffer
        optimizer.step()
        xla.sync()
    assert old.is_deleted()
    torch.testing.assert_close(weight.detach().cpu(), torch.full((256, 256), -3.0))


def test_what_was_copied_to_the_device_is_written_in_place() -> None:
    """Parameters and optimizer state come from the host: were they not the device's own, the first step copied all."""
    state = torch.zeros(64, 64).to("xla")
    where = value_of(state).buffer.unsafe_buffer_pointer()
    state.add_(1.0)
    xla.sync(wait=True)
    assert value_of(state).buffer.unsafe_buffer_pointer() == where
    assert state.sum().item() == 64 * 64


def test_donation_never_frees_what_is_still_in_use() -> None:
    state = torch.zeros(64, device="xla")
    kept = []
    for step in range(6):
        if step % 2:
            kept.append(state.clone())  # shares the value that is overwritten next
        view = state[:32]
        state.add_(1.0)
        xla.sync()
        assert view.sum().item() == 32 * (step + 1)
    assert [tensor[0].item() for tensor in kept] == [1, 3, 5]
    assert state[0].item() == 6


def test_a_tensor_shared_with_jax_survives_donation() -> None:
    state = torch.zeros(64, device="xla")
    xla.sync()
    array = value_of(state).buffer
    host = torch.from_dlpack(array)  # as a user of jax would look at it
    state.add_(1.0)
    xla.sync(wait=True)
    assert host.sum().item() == 0
    assert state.sum().item() == 64


def test_memory_does_not_grow_over_500_steps() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    _train(model, optimizer, 50)
    gc.collect()
    objects, memory = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _train(model, optimizer, 500)
    gc.collect()
    assert len(gc.get_objects()) - objects < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20_000  # KiB


def test_a_run_of_large_temporaries_ends_before_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LARGE", 100_000)  # of bytes

    def run(rows: int) -> torch.Tensor:
        a = torch.ones(rows, rows, device="xla")
        total = ((a @ a) @ (a @ a)).sum()
        xla.sync()
        return total

    small = run(8)
    assert state.large_run is None
    large = run(256)
    pending = state.large_run
    assert pending is value_of(large).buffer
    again = run(256)
    assert pending.is_ready()
    assert state.large_run is value_of(again).buffer
    assert [total.item() for total in (small, large, again)] == [8.0**5, 256.0**5, 256.0**5]
    state.large_run.delete()  # as if another program had written over it
    assert run(8).item() == 8.0**5
    assert state.large_run is None


def test_a_trace_keeps_no_buffers_after_it_ran() -> None:
    big = torch.ones(1000, device="xla")
    xla.sync()
    buffer = value_of(big).buffer
    result = big + 1
    xla.sync()
    del big
    gc.collect()
    assert not [o for o in gc.get_referrers(buffer) if isinstance(o, list | tuple)]
    assert result.sum().item() == 2000


def test_a_loop_without_any_barrier_is_cut_by_itself() -> None:
    total = torch.zeros((), device="xla")
    with config.override(max_pending_nodes=50), Counted() as counted:
        for step in range(200):
            total += torch.tensor([float(step)]).to("xla").sum()
    assert counted.counts["Execute"] >= 2
    assert counted.counts["UncachedCompile"] <= 3
    assert total.item() == sum(range(200))


def test_a_failing_lowering_names_the_operator_and_the_line() -> None:
    source = torch.full((7,), 0.5, device="xla")
    xla.sync()
    found = find("aten::erfinv")
    assert found is not None
    function = found.function
    object.__setattr__(found, "function", _broken)
    try:
        lost = source.erfinv()
        with pytest.raises(LoweringError, match=r"(?s)aten::erfinv .*no such function.*test_executor.py:\d+ in test_a"):
            xla.sync()
    finally:
        object.__setattr__(found, "function", function)
    with pytest.raises(LostValueError, match="LoweringError"):
        lost.cpu()
    with pytest.raises(LostValueError, match="was lost"):
        (lost + 1).cpu()
    assert (source + 1).tolist() == [1.5] * 7


def test_what_a_program_has_more_than_once_is_lowered_once() -> None:
    source = torch.full((9,), 0.5, device="xla")
    xla.sync()
    found = find("aten::erfinv")
    assert found is not None
    function, calls = found.function, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    object.__setattr__(found, "function", counting)
    try:
        result = (source.erfinv() * 0.5).erfinv() - source.erfinv()
        xla.sync()
    finally:
        object.__setattr__(found, "function", function)
    assert len(calls) == 1
    half = torch.full((9,), 0.5)
    torch.testing.assert_close(result.cpu(), (half.erfinv() * 0.5).erfinv() - half.erfinv())


def test_a_step_that_fails_to_compile_leaves_parameters_as_they_were() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _train(model, optimizer, 3)
    before = {name: value.clone().cpu() for name, value in model.state_dict().items()}
    xla.sync()
    functional.cross_entropy(model(torch.randn(4, 6).to("xla")), torch.zeros(4, dtype=torch.int64).to("xla")).backward()
    optimizer.step()
    found = find("aten::erfinv")
    assert found is not None
    function = found.function
    object.__setattr__(found, "function", _broken)
    try:
        lost = next(model.parameters()).erfinv()
        with pytest.raises(LoweringError):
            xla.sync()
    finally:
        object.__setattr__(found, "function", function)
    del lost
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), before[name], rtol=0, atol=0)
    optimizer.zero_grad()
    _train(model, optimizer, 3)


def test_a_program_that_fails_while_it_runs_says_what_it_was() -> None:
    kept = torch.ones(4, device="xla")
    xla.sync()
    huge = torch.ones(2**38, device="xla")
    with pytest.raises(ExecutionError, match=r"(?s)memory.*aten::mul.Tensor at .*test_executor.py:\d+"):
        (huge * 2 + 1).sort()[0].sum().item()
    assert (kept + 1).tolist() == [2] * 4


def _broken(*_args: object, **_kwargs: object) -> None:
    raise ValueError("no such function")


def test_the_data_of_a_storage_is_one_object_for_all_its_tensors() -> None:
    tensor = torch.ones(2, device="xla")
    assert storage_data(tensor) is storage_data(tensor.detach()) is storage_data(torch.nn.Parameter(tensor))
    assert storage_data(tensor.clone()) is not storage_data(tensor)


def test_reading_all_of_a_storage_in_another_shape_runs_no_program() -> None:
    source = torch.arange(6.0).to("xla")
    doubled = source * 2
    xla.sync()
    with Counted() as counted:
        assert doubled.view(2, 3).tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
        assert source.view(3, 2).unsqueeze(1).shape == torch.Size([3, 1, 2])
        assert source.view(3, 2).unsqueeze(1).cpu().shape == torch.Size([3, 1, 2])
    assert counted.counts == {"TransferFromDevice": 2}
    with Counted() as counted:
        assert doubled.view(2, 3).t()[0].tolist() == [0.0, 6.0]
    assert counted.counts["Execute"] == 1
