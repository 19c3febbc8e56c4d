"""LSTM, GRU and RNN layers as loops, against CPU torch: all variants, their gradients, and how much is recorded."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import xlatrainer as xla
from xlatrainer.backend import counters
from xlatrainer.backend._private_api import call_implicit_kernel
from xlatrainer.backend.state import state

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
STEPS, BATCH, FEATURES, HIDDEN = 7, 3, 4, 5
TOLERANCE = {F32: 2e-5, F64: 1e-10, BF16: 5e-2, F16: 5e-3}

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "bidirectional": {"bidirectional": True},
    "layers": {"num_layers": 3},
    "all": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no biases": {"bias": False, "bidirectional": True},
}


@pytest.fixture(autouse=True)
def _composed_by_cpu():
    """oneDNN's LSTM has no second derivative, and rounds half types in its own way."""
    before = torch.backends.mkldnn.set_flags(False)[0]
    yield
    torch.backends.mkldnn.set_flags(before)


def _states(layer: nn.RNNBase, batch: int, dtype: torch.dtype) -> list[Tensor]:
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or layer.hidden_size, layer.hidden_size][: 2 if layer.mode == "LSTM" else 1]
    return [torch.randn(rows, batch, width, dtype=F64).to(dtype) for width in widths]


def _parts(result: Any) -> list[Tensor]:
    output, ends = result
    ends = list(ends) if isinstance(ends, tuple) else [ends]
    return [output.data if isinstance(output, PackedSequence) else output, *ends]


def _run(layer: nn.RNNBase, rows: Tensor, states: list[Tensor], lengths: Any = None, **packing: Any) -> list[Tensor]:
    """Values, and gradients of the input, of the states and of all weights."""
    leaves = [tensor.detach().requires_grad_() for tensor in (rows, *states)]
    given: Any = leaves[0]
    if lengths is not None:
        given = pack_padded_sequence(given, lengths, batch_first=layer.batch_first, **packing)
    ends = tuple(leaves[1:]) if len(states) > 1 else leaves[1] if states else None
    parts = _parts(layer(given, ends))
    loss = sum((part.double() * (number + 1)).sin().sum() for number, part in enumerate(parts))
    asked = [*leaves, *(weight for weight in layer.parameters() if weight.requires_grad)]
    return [*parts, *torch.autograd.grad(loss, asked)]


def _compare(layer: nn.RNNBase, rows: Tensor, states: list[Tensor], *packing: Any, **options: Any) -> None:
    tolerance = TOLERANCE[rows.dtype]
    on_device = copy.deepcopy(layer).to("xla")
    expected = _run(layer, rows, states, *packing, **options)
    counters.reset()
    actual = _run(on_device, rows.to("xla"), [tensor.to("xla") for tensor in states], *packing, **options)
    assert not [name for name in counters.snapshot() if name.startswith("aten::")]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs, atol=tolerance, rtol=tolerance)


def _rows(layer: nn.RNNBase, dtype: torch.dtype = F32, steps: int = STEPS, batch: int = BATCH) -> Tensor:
    shape = (batch, steps) if layer.batch_first else (steps, batch)
    return torch.randn(*shape, layer.input_size, dtype=F64).to(dtype)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_equal_cpu(kind: str, options: str) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN, **OPTIONS[options])
    _compare(layer, _rows(layer), _states(layer, BATCH, F32))
    _compare(layer, _rows(layer), [])


@pytest.mark.parametrize("kind", KINDS)
def test_less_than_a_kilobyte(kind: str) -> None:
    """XLA would make such a loop one kernel, in which it takes no barriers."""
    layer = KINDS[kind](1, 1)
    _compare(layer, torch.randn(5, 1, 1), _states(layer, 1, F32))


@pytest.mark.parametrize("dtype", [F64, BF16, F16])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN, bidirectional=True, dtype=dtype)
    _compare(layer, _rows(layer, dtype), _states(layer, BATCH, dtype))


@pytest.mark.parametrize("bias", [True, False])
def test_projection(bias: bool) -> None:
    layer = nn.LSTM(FEATURES, HIDDEN, 2, proj_size=2, bidirectional=True, bias=bias)
    _compare(layer, _rows(layer), _states(layer, BATCH, F32))
    _compare(layer, _rows(layer), _states(layer, BATCH, F32), torch.tensor([7, 4, 1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 4, 5, 40])
def test_lengths(kind: str, steps: int) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN)
    _compare(layer, _rows(layer, steps=steps), _states(layer, BATCH, F32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [0, 1])
def test_batches(kind: str, batch: int) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN)
    _compare(layer, _rows(layer, batch=batch), _states(layer, batch, F32))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_batch(kind: str) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN)
    _compare(layer, _rows(layer)[:, 0], [tensor[:, 0] for tensor in _states(layer, BATCH, F32)])


@pytest.mark.parametrize("options", ["plain", "all", "no biases"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str, options: str) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN, **OPTIONS[options])
    states = _states(layer, 4, F32)
    _compare(layer, _rows(layer, batch=4), states, torch.tensor([7, 4, 4, 1]))
    _compare(layer, _rows(layer, batch=4), states, torch.tensor([2, 5, 1, 5]), enforce_sorted=False)
    _compare(layer, _rows(layer, batch=4), [], [3, 3, 3, 3])


def test_packed_sequences_of_half_types() -> None:
    layer = nn.GRU(FEATURES, HIDDEN, bidirectional=True, dtype=BF16)
    _compare(layer, _rows(layer, BF16), _states(layer, BATCH, BF16), torch.tensor([7, 4, 1]))


def test_padded_again() -> None:
    layer = nn.LSTM(FEATURES, HIDDEN, bidirectional=True)
    rows, lengths = _rows(layer), torch.tensor([2, 6, 5])

    def run(layer: nn.Module, rows: Tensor) -> list[Tensor]:
        rows = rows.detach().requires_grad_()
        packed = layer(pack_padded_sequence(rows, lengths, enforce_sorted=False))[0]
        padded, own_lengths = pad_packed_sequence(packed, padding_value=-2.0, total_length=9)
        assert own_lengths.tolist() == [2, 6, 5]
        return [padded, *torch.autograd.grad(padded.sin().sum(), rows)]

    expected = run(layer, rows)
    for ours, theirs in zip(run(copy.deepcopy(layer).to("xla"), rows.to("xla")), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-5, rtol=2e-5)


def test_one_tensor_as_state_and_cell() -> None:
    layer = nn.LSTM(FEATURES, HIDDEN)
    start = torch.randn(1, BATCH, HIDDEN)

    def run(layer: nn.Module, rows: Tensor, start: Tensor) -> Tensor:
        start = start.detach().requires_grad_()
        return torch.autograd.grad(layer(rows, (start, start))[0].sin().sum(), start)[0]

    rows = _rows(layer)
    expected = run(layer, rows, start)
    torch.testing.assert_close(run(copy.deepcopy(layer).to("xla"), rows.to("xla"), start.to("xla")).cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_where_they_are_asked_for(kind: str) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN, 2)
    layer.weight_ih_l0.requires_grad_(False)
    layer.bias_hh_l1.requires_grad_(False)
    _compare(layer, _rows(layer), _states(layer, BATCH, F32))
    on_device = copy.deepcopy(layer).to("xla")
    on_device(_rows(layer).to("xla"))[0].sum().backward()
    assert on_device.weight_ih_l0.grad is None
    assert on_device.bias_hh_l1.grad is None
    assert on_device.weight_hh_l0.grad is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kind: str, mode: Callable[[], Any]) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN, 2, bidirectional=True)
    rows = _rows(layer)
    on_device = copy.deepcopy(layer).to("xla")
    with mode():
        output = on_device(rows.to("xla"))[0]
        torch.testing.assert_close(output.cpu(), layer(rows)[0], atol=2e-5, rtol=2e-5)
    assert not output.requires_grad


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind: str, packed: bool) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN, bidirectional=True, dtype=F64)
    rows, start = _rows(layer, F64, steps=5), _states(layer, BATCH, F64)[0]

    def run(layer: nn.RNNBase, rows: Tensor, start: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (rows, start)]
        given = pack_padded_sequence(leaves[0], torch.tensor([5, 2, 1])) if packed else leaves[0]
        ends = (leaves[1], leaves[1]) if layer.mode == "LSTM" else leaves[1]
        loss = sum(part.sin().sum() for part in _parts(layer(given, ends)))
        asked = [*leaves, *layer.parameters()]
        first = torch.autograd.grad(loss, asked, create_graph=True)
        return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), asked)]

    expected = run(layer, rows, start)
    actual = run(copy.deepcopy(layer).to("xla"), rows.to("xla"), start.to("xla"))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-9, rtol=1e-9)


def test_gradients_by_torch_func() -> None:
    layer = nn.LSTM(FEATURES, HIDDEN)
    rows = _rows(layer)

    def run(layer: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        def loss(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(layer, weights, (rows,))[0].sin().sum()

        return torch.func.grad(loss)(dict(layer.named_parameters()))

    expected = run(layer, rows)
    for name, ours in run(copy.deepcopy(layer).to("xla"), rows.to("xla")).items():
        torch.testing.assert_close(ours.cpu(), expected[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_draws_as_torch_composes_it(packed: bool) -> None:
    layer = nn.GRU(FEATURES, HIDDEN, 3, dropout=0.5, bidirectional=True).to("xla")
    rows, start = torch.randn(STEPS, BATCH, FEATURES).to("xla"), torch.zeros(6, BATCH, HIDDEN).to("xla")
    weights = list(layer.parameters())
    options = True, 3, 0.5, True, True
    xla.manual_seed(3)
    if packed:
        given = pack_padded_sequence(rows, torch.tensor([7, 4, 1]))
        ours = layer(given)[0].data
        xla.manual_seed(3)
        operands = given.data, given.batch_sizes, start, weights, *options
        theirs = call_implicit_kernel(torch.ops.aten.gru.data, *operands)[0]
    else:
        ours = layer(rows)[0]
        xla.manual_seed(3)
        theirs = call_implicit_kernel(torch.ops.aten.gru.input, rows, start, weights, *options, False)[0]
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), atol=2e-5, rtol=2e-5)
    xla.manual_seed(4)
    again = (layer(given)[0].data if packed else layer(rows)[0]).cpu()
    assert (again != ours.cpu()).any()
    layer.eval()
    evaluated = (layer(given)[0].data if packed else layer(rows)[0]).cpu()
    assert torch.equal(evaluated, (layer(given)[0].data if packed else layer(rows)[0]).cpu())


def test_results_may_be_written() -> None:
    """The gradient does not read what the user was given."""
    layer = nn.LSTM(FEATURES, HIDDEN)
    rows = _rows(layer)

    def run(layer: nn.Module, rows: Tensor) -> Tensor:
        rows = rows.detach().requires_grad_()
        output, (state, cell) = layer(rows)
        output.mul_(2)
        state.add_(1)
        return torch.autograd.grad(output.sin().sum() + (state * cell).sum(), rows)[0]

    expected = run(layer, rows)
    torch.testing.assert_close(run(copy.deepcopy(layer).to("xla"), rows.to("xla")).cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN).to("xla")
    rows = torch.randn(STEPS, BATCH, FEATURES).to("xla")
    expected = layer(rows)[0]
    with torch.autocast("xla", dtype=BF16):
        output = layer(rows)[0]
        assert output.dtype == BF16
        packed = layer(pack_padded_sequence(rows, [7, 7, 7]))[0].data
    assert packed.dtype == BF16
    torch.testing.assert_close(output.float().cpu(), expected.cpu(), atol=0.05, rtol=0.05)
    output.float().sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype == F32 for weight in layer.parameters())


_WEIGHTS = ((4 * HIDDEN, FEATURES), (4 * HIDDEN, HIDDEN), (4 * HIDDEN,), (4 * HIDDEN,))


def _lstm(device: str, *, rows: Any = (STEPS, BATCH, FEATURES), dtype: Any = F32, shapes: Any = _WEIGHTS) -> Any:
    given = torch.zeros(rows, dtype=dtype).to(device)
    start = torch.zeros(1, BATCH, HIDDEN).to(device)
    weights = [torch.zeros(shape).to(device) for shape in shapes]
    return torch.lstm(given, (start, start), weights, len(shapes) == 4, 1, 0.0, False, False, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": (0, BATCH, FEATURES)},
        {"shapes": _WEIGHTS[:3]},
    ],
)
def test_errors_are_torchs(wrong: dict[str, Any]) -> None:
    """What is wrong goes to torch's composition."""
    with pytest.raises(RuntimeError) as expected:
        _lstm("cpu", **wrong)
    with pytest.raises(RuntimeError) as raised:
        _lstm("xla", **wrong)
    assert str(raised.value).split("\n")[0] == str(expected.value).split("\n")[0]


def test_dtypes_must_agree() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        _lstm("xla", dtype=F64)


def _recorded(layer: nn.Module, steps: int) -> int:
    """How many operators a forward and a backward pass record."""
    rows = torch.randn(steps, BATCH, FEATURES).to("xla")
    xla.sync()
    layer(rows)[0].sum().backward()
    recorded = state.trace.num_nodes
    xla.sync()
    return recorded


@pytest.mark.parametrize("kind", KINDS)
def test_longer_sequences_record_no_more(kind: str) -> None:
    layer = KINDS[kind](FEATURES, HIDDEN, 2, bidirectional=True).to("xla")
    _recorded(layer, 5)  # gradients are made
    assert _recorded(layer, 8) == _recorded(layer, 80)


def test_equal_lengths_compile_once() -> None:
    layer = nn.LSTM(FEATURES, HIDDEN, 2).to("xla")
    for _ in range(2):
        _recorded(layer, 9)
    counters.reset()
    _recorded(layer, 9)
    assert counters.value("UncachedCompile") == 0


def test_packed_lengths_are_data() -> None:
    """Other lengths with the same longest one and the same sum run the same program."""
    layer = nn.GRU(FEATURES, HIDDEN, bidirectional=True)
    on_device = copy.deepcopy(layer).to("xla")
    rows = torch.randn(STEPS, 4, FEATURES)
    for number, lengths in enumerate(([7, 4, 4, 1], [7, 6, 2, 1], [7, 3, 3, 3])):
        expected = pad_packed_sequence(layer(pack_padded_sequence(rows, lengths))[0])[0]
        given = rows.to("xla").requires_grad_()
        on_device.zero_grad()
        xla.sync()
        counters.reset()
        actual = pad_packed_sequence(on_device(pack_padded_sequence(given, lengths))[0])[0]
        actual.sum().backward()
        xla.sync()
        assert number == 0 or counters.value("UncachedCompile") == 0, lengths
        torch.testing.assert_close(actual.cpu(), expected, atol=2e-5, rtol=2e-5)


def test_compiled_steps() -> None:
    """A training step is replayed, and goes on like the CPU's, with packed sequences of changing lengths too."""

    def losses(device: str, lengths: list[list[int]] | None) -> list[float]:
        torch.manual_seed(0)
        layer = nn.LSTM(FEATURES, HIDDEN, 2)
        batches = [torch.randn(STEPS, 4, FEATURES).to(device) for _ in range(6)]
        layer = layer.to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

        def step(rows: Tensor, lengths: Any) -> Tensor:
            given: Any = rows if lengths is None else pack_padded_sequence(rows, lengths)
            loss = _parts(layer(given))[0].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = xla.compile(step) if device == "xla" else step
        return [run(batch, lengths and lengths[i % len(lengths)]).item() for i, batch in enumerate(batches)]

    for lengths in (None, [[7, 4, 4, 1], [7, 6, 2, 1], [7, 3, 3, 3], [5, 5, 5, 1]]):
        before = counters.value("Replay")
        torch.testing.assert_close(losses("xla", lengths), losses("cpu", lengths), atol=1e-5, rtol=1e-5)
        assert lengths is not None or counters.value("Replay") > before


def test_torch_compile() -> None:
    layer = nn.GRU(FEATURES, HIDDEN)
    rows = _rows(layer)
    on_device = copy.deepcopy(layer).to("xla")
    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        output = torch.compile(on_device, backend="openxla")(rows.to("xla"))[0]
        output.sin().sum().backward()
    torch.compiler.reset()
    expected = layer(rows)[0]
    expected.sin().sum().backward()
    torch.testing.assert_close(output.cpu(), expected, atol=2e-5, rtol=2e-5)
    for ours, theirs in zip(on_device.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=2e-5, rtol=2e-5)
