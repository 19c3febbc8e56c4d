"""LSTM, GRU and RNN layers as operators of our own, one for each layer and direction, which are loops in the program.

torch makes such layers of one cell after another, so programs, and the time to compile them, grow with the length of
the sequences. The calls (`aten::lstm.input` and its like) stand before autograd here, as those of `composites` do; what
the loops are not made for is handed to torch's own composition.

Owns the operators' schemas and shapes, their gradient, and how layers are stacked; `lowerings/recurrent_layers.py` has
the loops.

May import: torch, packed_sequences, _private_api.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.forward_ad import unpack_dual

from xlatrainer.backend._private_api import call_implicit_kernel, function_transforms_active
from xlatrainer.backend.packed_sequences import are_batch_sizes

__all__ = ["RECURRENT"]

aten = torch.ops.aten
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_WITH_GATES = ("lstm", "gru")  # which their gradients need; the others' need their states alone
_FEW_STEPS = 4  # for which cells are up to a sixth faster, and compile as fast (`benchmarks/recurrent.py`)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_WEIGHTS = "Tensor w_ih, Tensor w_hh, {biases}Tensor? w_hr, Tensor? batch_sizes"
_library = torch.library.Library("xlatrainer", "DEF")
_library.define(
    f"recurrent_layer(Tensor input, Tensor hx, Tensor? cx, {_WEIGHTS.format(biases='Tensor? b_ih, Tensor? b_hh, ')}, "
    "str mode, bool reverse, bool save) -> "
    "(Tensor output, Tensor hy, Tensor cy, Tensor states, Tensor cells, Tensor gates)"
)
_library.define(
    "recurrent_layer_backward(Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, Tensor input, Tensor hx, "
    f"Tensor? cx, {_WEIGHTS.format(biases='')}, Tensor states, Tensor? cells, Tensor? gates, str mode, bool reverse) "
    "-> (Tensor input, Tensor hx, Tensor cx, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor w_hr)"
)
_layer = torch.ops.xlatrainer.recurrent_layer.default
_layer_backward = torch.ops.xlatrainer.recurrent_layer_backward.default


def _layer_shapes(
    input: Any,
    hx: Any,
    cx: Any,
    w_ih: Any,
    w_hh: Any,
    b_ih: Any,
    b_hh: Any,
    w_hr: Any,
    batch_sizes: Any,
    mode: str,
    reverse: bool,
    save: bool,
) -> Any:
    output = hx.new_empty(*input.shape[:-1], hx.shape[1])
    results = output, torch.empty_like(hx), None if cx is None else torch.empty_like(cx)
    if not save:
        return *results, None, None, None
    steps = input.shape[0] if batch_sizes is None else batch_sizes.shape[0]
    states, cells, gates = (
        hx.new_empty(steps, hx.shape[0], width) for width in (hx.shape[1], w_hh.shape[0] // _GATES[mode], w_hh.shape[0])
    )
    return *results, states, *((cells, gates) if mode in _WITH_GATES else (None, None))


def _layer_backward_shapes(
    grad_output: Any, grad_hy: Any, grad_cy: Any, input: Any, hx: Any, cx: Any, w_ih: Any, w_hh: Any, w_hr: Any, *_: Any
) -> Any:
    bias = w_hh.new_empty(w_hh.shape[0])
    given = (input, hx, cx, w_ih, w_hh, bias, bias, w_hr)
    return tuple(None if tensor is None else torch.empty_like(tensor) for tensor in given)


_library.impl("recurrent_layer", _layer_shapes, "Meta")
_library.impl("recurrent_layer_backward", _layer_backward_shapes, "Meta")


class _Weights(NamedTuple):
    """Of one layer in one direction."""

    w_ih: torch.Tensor
    w_hh: torch.Tensor
    b_ih: torch.Tensor | None = None
    b_hh: torch.Tensor | None = None
    w_hr: torch.Tensor | None = None


class _Sequences(NamedTuple):
    """How many sequences reach each step, where they are packed: on the CPU, and on the device as data."""

    on_cpu: torch.Tensor | None = None
    on_device: torch.Tensor | None = None


class _Layer(torch.autograd.Function):
    """A layer in one direction. Its gradient is one operator; a gradient of that is torch's own."""

    @staticmethod
    def forward(
        ctx: Any, mode: str, reverse: bool, sequences: _Sequences, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *results, states, cells, gates = _layer(*tensors, sequences.on_device, mode, reverse, True)
        ctx.save_for_backward(*tensors, states, cells, gates)
        ctx.set_materialize_grads(False)
        ctx.call = mode, reverse, sequences
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        mode, reverse, sequences = ctx.call
        *tensors, states, cells, gates = ctx.saved_tensors
        asked = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return None, None, None, *_differentiable_gradients(ctx.call, tensors, asked, grads)
        input, hx, cx, w_ih, w_hh, _, _, w_hr = tensors
        operands = input, hx, cx, w_ih, w_hh, w_hr, sequences.on_device, states, cells, gates
        found = _layer_backward(*grads, *operands, mode, reverse)
        return None, None, None, *(grad if wants else None for grad, wants in zip(found, asked, strict=True))


def _differentiable_gradients(
    call: Any, tensors: Sequence[torch.Tensor | None], asked: Sequence[bool], grads: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradients by torch's own composition of the layer, which can be differentiated again.

    Each input is an alias, so that one that is there twice (a state that is the cell too) has two gradients.
    """
    with torch.enable_grad():
        aliases = [tensor.view_as(tensor) if tensor is not None else None for tensor in tensors]
        results = _composed_layer(*call, *aliases)
    wanted = [alias for alias, wants in zip(aliases, asked, strict=True) if wants and alias is not None]
    used = [(result, grad) for result, grad in zip(results, grads, strict=False) if grad is not None]
    outputs, given = [result for result, _ in used], [grad for _, grad in used]
    found = iter(torch.autograd.grad(outputs, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if wants else None for wants in asked]


def _composed_layer(
    mode: str, reverse: bool, sequences: _Sequences, input: Any, hx: Any, cx: Any, *weights: Any
) -> list[torch.Tensor]:
    """Output, state and cell of a layer in one direction, made by torch of one cell after another."""
    params = [weight for weight in weights if weight is not None]
    has_biases = weights[2] is not None
    states = hx[None] if cx is None else [hx[None], cx[None]]
    packet = getattr(aten, mode)
    if sequences.on_cpu is None:
        rows = input.flip(0) if reverse else input
        output, *ends = call_implicit_kernel(
            packet.input, rows, states, params, has_biases, 1, 0.0, False, False, False
        )
        output = output.flip(0) if reverse else output
    else:
        order = _reversed_rows(sequences.on_cpu).to(input.device) if reverse else None
        rows = input if order is None else input[order]
        output, *ends = call_implicit_kernel(
            packet.data, rows, sequences.on_cpu, states, params, has_biases, 1, 0.0, False, False
        )
        output = output if order is None else output[order]
    return [output, *(end[0] for end in ends)]


def _reversed_rows(batch_sizes: torch.Tensor) -> torch.Tensor:
    """For each row of packed sequences the row that takes its place if each sequence is turned round."""
    active = torch.arange(int(batch_sizes[0])) < batch_sizes[:, None]  # (T, B)
    lengths = active.sum(0)
    step, row = active.nonzero(as_tuple=True)
    starts = batch_sizes.cumsum(0) - batch_sizes
    return starts[lengths[row] - 1 - step] + row


def _run_layer(mode: str, reverse: bool, sequences: _Sequences, *tensors: torch.Tensor | None) -> Any:
    """Output, state and cell, None where there is no cell."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _Layer.apply(mode, reverse, sequences, *tensors)
    return _layer(*tensors, sequences.on_device, mode, reverse, False)[:3]


class _Call(NamedTuple):
    """A call of `aten::lstm.input` or its like; time comes first in `input`, unless sequences are packed."""

    mode: str
    input: torch.Tensor
    states: Sequence[torch.Tensor]
    params: Sequence[torch.Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    bidirectional: bool
    batch_sizes: torch.Tensor | None

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def weights(self) -> list[_Weights]:
        """Of each layer, and for each of its directions in turn."""
        projected = len(self.states) == 2 and self.states[0].shape[2] != self.states[1].shape[2]
        each = 2 + 2 * self.has_biases + projected
        return [self._group(first, projected) for first in range(0, len(self.params), each)]

    def _group(self, first: int, projected: bool) -> _Weights:
        last = first + 2 + 2 * self.has_biases
        b_ih, b_hh = self.params[first + 2 : last] if self.has_biases else (None, None)
        return _Weights(
            self.params[first], self.params[first + 1], b_ih, b_hh, self.params[last] if projected else None
        )


def _fits(call: _Call) -> bool:
    """Whether the loops are made for a call. All others, wrong ones among them, are torch's."""
    tensors = [call.input, *call.states, *call.params]
    if function_transforms_active() or any(unpack_dual(tensor).tangent is not None for tensor in tensors):
        return False
    input = call.input
    if input.dtype not in _DTYPES or any(t.dtype is not input.dtype or t.device != input.device for t in tensors):
        return False
    sizes = call.batch_sizes
    if input.dim() != (3 if sizes is None else 2) or len(call.states) != (2 if call.mode == "lstm" else 1):
        return False
    if any(state.dim() != 3 for state in call.states):
        return False
    layers, batch, width = call.states[0].shape
    hidden = call.states[-1].shape[2]
    if layers != call.num_layers * call.directions or call.states[-1].shape[:2] != (layers, batch):
        return False
    if sizes is not None:  # cells would make a program for each set of lengths
        if not are_batch_sizes(sizes, input.shape[0]) or int(sizes[0]) != batch:
            return False
    elif input.shape[1] != batch or input.shape[0] <= _FEW_STEPS:
        return False
    if any(param.dim() not in (1, 2) for param in call.params):
        return False
    projected = hidden != width
    if len(call.params) != layers * (2 + 2 * call.has_biases + projected):
        return False
    gates = _GATES[call.mode] * hidden
    for number, weights in enumerate(call.weights()):
        features = input.shape[-1] if number < call.directions else width * call.directions
        shapes = [(gates, features), (gates, width), (gates,), (gates,), (width, hidden)]
        if any(tensor is not None and tensor.shape != shape for tensor, shape in zip(weights, shapes, strict=True)):
            return False
    return True


def _run(call: _Call) -> tuple[torch.Tensor, ...]:
    """The output of the last layer, and for each kind of state those at the end of all layers and directions."""
    sequences = _Sequences()
    if call.batch_sizes is not None:
        sequences = _Sequences(call.batch_sizes, call.batch_sizes.to(call.input.device))
    starts = [state.unbind(0) for state in call.states]
    ends: list[list[torch.Tensor]] = [[] for _ in call.states]
    rows = call.input
    for number, weights in enumerate(call.weights()):
        reverse = number % call.directions == 1
        hx, cx = starts[0][number], starts[1][number] if len(starts) == 2 else None
        output, *states = _run_layer(call.mode, reverse, sequences, rows, hx, cx, *weights)
        for end, state in zip(ends, states, strict=False):
            end.append(state)
        if not reverse:
            outputs = []
        outputs.append(output)
        if len(outputs) == call.directions:
            rows = torch.cat(outputs, -1) if call.bidirectional else output
            if call.dropout and number + 1 < len(starts[0]):
                rows = torch.dropout(rows, call.dropout, True)
    return rows, *(torch.stack(end) for end in ends)


def _states(hx: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [hx] if isinstance(hx, torch.Tensor) else hx


def _of_padded(mode: str) -> Callable[..., Any]:
    overload = getattr(aten, mode).input

    def kernel(
        input: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        rows = input.transpose(0, 1) if batch_first and input.dim() == 3 else input
        share = dropout if train else 0.0
        call = _Call(mode, rows, _states(hx), params, has_biases, num_layers, share, bidirectional, None)
        if not _fits(call):
            options = has_biases, num_layers, dropout, train, bidirectional, batch_first
            return call_implicit_kernel(overload, input, hx, params, *options)
        output, *ends = _run(call)
        return output.transpose(0, 1) if batch_first else output, *ends

    return kernel


def _of_packed(mode: str) -> Callable[..., Any]:
    overload = getattr(aten, mode).data

    def kernel(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        share = dropout if train else 0.0
        call = _Call(mode, data, _states(hx), params, has_biases, num_layers, share, bidirectional, batch_sizes)
        if not _fits(call):
            options = has_biases, num_layers, dropout, train, bidirectional
            return call_implicit_kernel(overload, data, batch_sizes, hx, params, *options)
        return _run(call)

    return kernel


# By overload, without `aten::`.
RECURRENT: dict[str, Callable[..., Any]] = {
    **{f"{mode}.input": _of_padded(mode) for mode in _GATES},
    **{f"{mode}.data": _of_packed(mode) for mode in _GATES},
}
