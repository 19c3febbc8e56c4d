"""Runs an operator of torch's database on the CPU and on `xla`, in every way that the suite compares.

Owns how a sample is put on the device (with its strides and what lies beside it in its storage), which ways of calling
there are (`Way`), and that all samples of an operator and dtype end in one program, since compiling is what costs. What
is equal is decided in `opinfo_compare.py`, what is left out in `opinfo_tables.py`.
"""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map

import xlatrainer as xla
from tests.backend.opinfo_compare import difference
from tests.backend.opinfo_database import OpInfo, SampleInput, full_name, tensors
from tests.backend.opinfo_tables import CANONICAL, EXCLUDED, STAYS_ON_CPU, Exclusion
from xlatrainer.backend import counters

__all__ = ["DTYPES", "Outcome", "Way", "check", "exclusions", "to_cpu", "to_xla"]

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64)

SECOND_GRADIENTS = 2  # samples of each operator and dtype whose gradients are differentiated once more
IN_PLACE_GRADIENTS = 2

# What the CPU raises for a sample that it does not accept; such a sample is not one.
REFUSALS = (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError, AssertionError)


class Way(enum.Enum):
    """How an operator is called."""

    VALUE = "value"
    GRADIENT = "gradient"
    SECOND = "second gradient"
    STRIDED = "strided inputs"
    IN_PLACE = "in place"


@dataclass(frozen=True)
class Failure:
    way: Way
    sample: int
    text: str

    def __str__(self) -> str:
        return f"sample {self.sample}, {self.way.value}: {self.text}"


@dataclass
class Outcome:
    """What one operator and dtype came to."""

    failures: list[Failure] = field(default_factory=list)
    ran: dict[Way, int] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)

    def fail(self, way: Way, sample: int, text: str) -> None:
        self.failures.append(Failure(way, sample, text.strip()[:2000]))


def exclusions(op: OpInfo, dtype: torch.dtype) -> list[Exclusion]:
    """What the tables say of an operator and dtype; the variant's own entry comes before the operator's."""
    listed = EXCLUDED.get(full_name(op)) or EXCLUDED.get(op.name) or ()
    return [entry for entry in listed if not entry.dtypes or dtype in entry.dtypes]


# inputs


def to_xla(leaf: Any) -> Any:
    """A tensor on the device with the strides of `leaf` and the same storage around it; a device becomes `xla`."""
    if isinstance(leaf, torch.device):
        return torch.device("xla")
    if not isinstance(leaf, torch.Tensor):
        return leaf
    plain = leaf.detach()
    if plain.layout is not torch.strided:
        return plain.to("xla")
    whole = plain.untyped_storage().nbytes() // plain.element_size()
    if whole == plain.numel() and plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        moved = plain.to("xla")
    else:
        flat = plain.as_strided((whole,), (1,), 0).to("xla")
        moved = flat.as_strided(plain.shape, plain.stride(), plain.storage_offset())
    return moved.requires_grad_(leaf.requires_grad)


def to_cpu(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _copy(leaf: Any) -> Any:
    """A tensor of its own to differentiate, with the strides and the storage of `leaf`."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    plain = leaf.detach()
    if plain.is_conj() or plain.is_neg():
        return plain.clone().requires_grad_(leaf.requires_grad)
    whole = plain.untyped_storage().nbytes() // plain.element_size()
    flat = plain.as_strided((whole,), (1,), 0).clone()
    return flat.as_strided(plain.shape, plain.stride(), plain.storage_offset()).requires_grad_(leaf.requires_grad)


def _strided(number: int) -> Callable[[Any], Any]:
    """Inputs with other strides: every second element of a row (with an offset), or the dims laid out backwards."""

    def strided(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.numel() < 2:
            return leaf
        plain = leaf.detach()
        if leaf.dim() == 1 or number % 2:
            result = torch.stack([plain, plain], -1)[..., 1]
        else:
            backwards = tuple(reversed(range(leaf.dim())))
            result = plain.permute(backwards).contiguous().permute(backwards)
        return result.requires_grad_(leaf.requires_grad)

    return strided


_MORE_PRECISE = {
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def _precise(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype):
        return _MORE_PRECISE.get(leaf, leaf)
    if isinstance(leaf, torch.Tensor) and leaf.dtype in _MORE_PRECISE:
        return _copy(leaf).detach().to(_MORE_PRECISE[leaf.dtype]).requires_grad_(leaf.requires_grad)
    return leaf


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def samples(op: OpInfo, dtype: torch.dtype, count: int) -> Iterator[SampleInput]:
    """The first samples that draw no random numbers."""
    wants_gradient = op.supports_autograd and (dtype is torch.float32 or dtype is torch.complex64)
    found = op.sample_inputs("cpu", dtype, requires_grad=wants_gradient)
    return islice((sample for sample in found if not sample.kwargs.get("dropout_p")), count)


# calls


def _heads(results: list[torch.Tensor], seed: int, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Random gradients of the results, the same on every device and, but for rounding, in every precision."""
    generator = torch.Generator().manual_seed(seed)
    heads = [torch.rand(r.shape, dtype=dtype, generator=generator) for r, dtype in zip(results, dtypes, strict=True)]
    return [head.to(result.dtype).to(result.device) for head, result in zip(heads, results, strict=True)]


_LESS_PRECISE = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _gradients(results: Any, wanted: list[torch.Tensor], seed: int, again: bool = False) -> Any:
    """Gradients of `wanted` for random gradients of the results; an empty list where there are none."""
    given = [tensor for tensor in tensors(results) if tensor.requires_grad]
    if not wanted or not given:
        return []
    heads = _heads(given, seed, [_LESS_PRECISE.get(tensor.dtype, tensor.dtype) for tensor in given])
    return list(torch.autograd.grad(given, wanted, heads, allow_unused=True, create_graph=again))


def _processed(sample: SampleInput, results: Any) -> Any:
    """What of the results is determined: the database's own word on eigenvectors and the like."""
    return sample.output_process_fn_grad(results)


def _run(op: OpInfo, call: "_Call", inputs: Inputs) -> dict[Way, Any]:
    """The results of one call by the way that they are to be named after."""
    args, kwargs = inputs
    wanted = [tensor for tensor in tensors(inputs) if tensor.requires_grad]
    if call.way is Way.IN_PLACE:
        target = args[0].clone()
        result = op.inplace_variant(target, *args[1:], **kwargs)
        assert result is target, "the in-place form must return its first argument"
        gradient = _gradients(result, wanted, 0) if call.number < IN_PLACE_GRADIENTS else []
        return {Way.IN_PLACE: (result, gradient)}
    results = op(*args, **kwargs)
    canonical = CANONICAL.get(op.name)
    values = canonical(results, *args, **kwargs) if canonical else results
    if call.way is Way.STRIDED:
        return {Way.STRIDED: (values, _gradients(_processed(call.sample, results), wanted, 0))}
    found = {Way.VALUE: values}
    if wanted and call.depth:
        again = call.depth > 1
        found[Way.GRADIENT] = _gradients(_processed(call.sample, results), wanted, 0, again)
        if again:
            found[Way.SECOND] = _gradients(found[Way.GRADIENT], wanted, 1)
    return found


@dataclass
class _Call:
    """One call on both devices, to be compared once the program of all has run.

    `depth` is how often it is differentiated.
    """

    sample: SampleInput
    number: int
    way: Way
    inputs: Inputs
    depth: int = 0
    expected: dict[Way, Any] = field(default_factory=dict)
    actual: dict[Way, Any] = field(default_factory=dict)


def _expected(op: OpInfo, call: _Call) -> bool:
    """Run the call on the CPU, differentiated as often as the CPU can; False if it refuses the call altogether."""
    plain = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, call.inputs)
    for depth, inputs in [(d, call.inputs) for d in range(call.depth, 0, -1)] + [(0, plain)]:
        call.depth = depth
        try:
            call.expected = _run(op, call, tree_map(_copy, inputs))
        except REFUSALS:
            continue
        call.inputs = inputs
        return True
    return False


def _calls(op: OpInfo, dtype: torch.dtype, count: int, ways: frozenset[Way]) -> Iterator[_Call]:
    for number, sample in enumerate(samples(op, dtype, count)):
        if op.is_factory_function or "device" in sample.kwargs:
            sample.kwargs["device"] = torch.device("cpu")
        inputs = ((sample.input, *sample.args), sample.kwargs)
        depth = (2 if op.supports_gradgrad and number < SECOND_GRADIENTS else 1) if op.supports_autograd else 0
        call = _Call(sample, number, Way.VALUE, inputs, depth)
        if not _expected(op, call):
            continue
        yield call
        others = []
        if Way.STRIDED in ways and any(tensor.dim() and tensor.numel() > 1 for tensor in tensors(inputs)):
            strided = tree_map(_strided(number), call.inputs)
            others.append(_Call(sample, number, Way.STRIDED, strided, min(call.depth, 1)))
        if Way.IN_PLACE in ways and op.inplace_variant is not None and not sample.broadcasts_input:
            others.append(_Call(sample, number, Way.IN_PLACE, call.inputs, min(call.depth, 1)))
        yield from (other for other in others if _expected(op, other))


def _on_device(op: OpInfo, inputs: Inputs) -> Inputs:
    stays = STAYS_ON_CPU.get(op.name, ())
    args = tuple(arg if i in stays else tree_map(to_xla, arg) for i, arg in enumerate(inputs[0]))
    kwargs = {name: arg if name in stays else tree_map(to_xla, arg) for name, arg in inputs[1].items()}
    return args, kwargs


def _record(op: OpInfo, call: _Call, outcome: Outcome) -> None:
    """Run one call on the device; it may leave everything pending."""
    try:
        call.actual = _run(op, call, _on_device(op, call.inputs))
    except REFUSALS as error:
        outcome.fail(call.way, call.number, f"{type(error).__name__}: {error}")


def _compare(op: OpInfo, call: _Call, outcome: Outcome) -> None:
    def precise(way: Way) -> Any:
        twin = replace(call, inputs=tree_map(_precise, call.inputs), expected={})
        return twin.expected.get(way) if _expected(op, twin) else None

    for way, expected in call.expected.items():
        outcome.ran[way] = outcome.ran.get(way, 0) + 1
        if way not in call.actual:
            if call.actual:
                outcome.fail(way, call.number, "no result")
            continue
        try:
            found = difference(op.name, call.actual[way], expected, partial(precise, way))
        except REFUSALS as error:
            found = f"{type(error).__name__}: {error}"
        if found:
            outcome.fail(way, call.number, found)


def check(op: OpInfo, dtype: torch.dtype, count: int, ways: frozenset[Way] = frozenset(Way)) -> Outcome:
    """Compare the first `count` samples in all `ways`, in one program where that works."""
    outcome = Outcome()
    before = counters.snapshot()
    calls = list(_calls(op, dtype, count, ways))
    for call in calls:
        _record(op, call, outcome)
    try:
        xla.sync()
    except REFUSALS:
        # One call spoils the program of all: run each alone to see which.
        outcome.failures.clear()
        for call in calls:
            call.actual = {}
            _record(op, call, outcome)
            _compare(op, call, outcome)
    else:
        for call in calls:
            _compare(op, call, outcome)
    after = counters.snapshot()
    outcome.fallbacks = [n for n, c in after.items() if n.startswith("aten::") and c > before.get(n, 0)]
    return outcome
