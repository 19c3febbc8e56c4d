"""`out=` of every operator of torch's database that has it: on `xla` all comes as on the CPU.

Each operator is called once for each way of giving `out=` (`CASES`): of the right shape, empty, of another shape, with
other strides, of another dtype, sharing memory with an input, wanting a gradient. The two devices must agree on whether
it fails and how, whether a warning says that the tensor was resized, on shape, dtype, strides and values, and on the
memory around a tensor that is a view. The operators of everyday models run always, the whole database is marked slow.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.backend.opinfo_database import OPERATORS, OpInfo, full_name, tensors
from tests.backend.outcomes import Mirror, Outcome, outcome

pytestmark = pytest.mark.filterwarnings("ignore")

GARBAGE = 7


def _filled(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, GARBAGE, dtype=dtype)


def _strided(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Transposed, every second element of a larger memory, not from its start."""
    shape = [*reversed(result.shape)]
    base = _filled([2 * n + 1 for n in shape] or [3], result.dtype)
    if not shape:
        return base[1]
    return base[tuple(slice(1, 2 * n + 1, 2) for n in shape)].permute(*reversed(range(len(shape))))


def _wants_gradient(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    return _filled(result.shape, result.dtype).requires_grad_() if result.is_floating_point() else None


def _expanded(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """One element for all, in a memory that would hold all: a few CPU kernels do not look before they write."""
    if result.numel() < 2:
        return None
    return _filled([result.numel()], result.dtype).as_strided(result.shape, [0] * result.dim())


def _first_input(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """The input of which `out=` could be a part of the memory."""
    for tensor in inputs:
        if tensor.shape == result.shape and tensor.dtype == result.dtype and tensor.is_contiguous() and tensor.dim():
            return tensor
    return None


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _narrower(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.float32
    return torch.int64 if dtype.is_floating_point else torch.bool


def _wrong_shape(result: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    shape = list(result.shape) or [1]
    return _filled([*shape[:-1], shape[-1] + 1] if result.dim() else [2], result.dtype)


# From a result and the inputs, an `out=`; None where the case does not arise.
Case = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor | None]
CASES: dict[str, Case] = {
    "right shape": lambda result, inputs: _filled(result.shape, result.dtype),
    "empty": lambda result, inputs: torch.empty(0, dtype=result.dtype),
    "wrong shape": _wrong_shape,
    "strides": _strided,
    "wider dtype": lambda result, inputs: _filled(result.shape, _wider(result.dtype)),
    "narrower dtype": lambda result, inputs: _filled(result.shape, _narrower(result.dtype)),
    "wants gradient": _wants_gradient,
    "expanded": _expanded,
    "is an input": _first_input,
}

_NO_STRIDES = "the CPU writes as if there were no strides"
_READ_LATER = "the CPU reads what it has overwritten"
# By operator and case. A row that is not needed fails the test.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("linalg.solve", "is an input"): "torch's composition resizes an `out=` of its own, and warns of it on the device",
    ("narrow_copy", "strides"): _NO_STRIDES,
    ("native_batch_norm", "is an input"): _READ_LATER,
    ("nn.functional.avg_pool2d", "is an input"): _READ_LATER,
    ("nn.functional.avg_pool3d", "strides"): _NO_STRIDES,
    ("nn.functional.gelu", "strides"): _NO_STRIDES,
}

_RANDOM = "bernoulli multinomial normal randint randn rand nn.functional.fractional_max_pool2d"
_UNDEFINED = "empty"
_FREE = "linalg.eig linalg.eigh linalg.svd svd"  # vectors are unique up to a sign or a factor
NOT_COMPARED = frozenset(f"{_RANDOM} {_UNDEFINED} {_FREE}".split())  # but for shapes, dtypes and strides

LEFT_OUT = {
    "sparse.sampled_addmm": "the device has no sparse tensors",
}

_EVERYDAY = """
    abs add addmm all amax arange argmax baddbmm bitwise_and bmm cat ceil clamp cos cumsum div eq exp floor gather
    index_select isin linalg.vector_norm log logical_not logsumexp lt masked_select matmul max.binary
    max.reduction_with_dim mean mm mul ne neg norm pow prod rsqrt sigmoid softmax sort sqrt stack std sub sum take tanh
    topk tril var where nn.functional.avg_pool2d nn.functional.linear nn.functional.gelu nn.functional.softplus
    """
EVERYDAY = frozenset(_EVERYDAY.split())

OPERATORS_WITH_OUT = [op for op in OPERATORS if op.supports_out and full_name(op) not in LEFT_OUT]


def _dtype(op: OpInfo) -> torch.dtype:
    return next(d for d in (torch.float32, torch.int64, torch.bool, *op.dtypes) if d in op.dtypes)


def _sample(op: OpInfo) -> tuple[Any, Any]:
    """Inputs of the first sample that has a result of two elements or more, else of the first; and that result."""
    found: list[tuple[Any, Any]] = []
    for sample in islice(op.sample_inputs("cpu", _dtype(op), requires_grad=False), 20):
        if op.is_factory_function:
            sample.kwargs["device"] = torch.device("cpu")
        inputs = ((sample.input, *sample.args), sample.kwargs)
        on_cpu = outcome(op, *inputs[0], **inputs[1])
        if on_cpu.error is None and _is_tensors(on_cpu.result):
            found.append((inputs, on_cpu.result))
            if sum(tensor.numel() for tensor in tensors(on_cpu.result)) > 1:
                return found[-1]
    return found[0] if found else pytest.skip("the samples give no tensors")


def _is_tensors(result: Any) -> bool:
    return all(isinstance(item, torch.Tensor) for item in (result if isinstance(result, tuple | list) else [result]))


@dataclass
class _Trial:
    """One case on both devices: what it came to, and the `out=` arguments with the memory behind them."""

    name: str
    on_cpu: Outcome
    on_xla: Outcome
    given: Any
    there: Any
    mirror: Mirror

    def difference(self, compare_values: bool) -> str:
        if self.name == "expanded" or self.on_cpu.error is not None or self.on_xla.error is not None:
            return self._error_difference()
        if self._resize_warnings(self.on_cpu) != self._resize_warnings(self.on_xla):
            return f"warned {self.on_xla.warned} instead of {self.on_cpu.warned}"
        for cpu, xla in zip(tensors(self.given), tensors(self.there), strict=True):
            if (cpu.shape, cpu.dtype) != (xla.shape, xla.dtype):
                return f"{xla.dtype}{list(xla.shape)} instead of {cpu.dtype}{list(cpu.shape)}"
            if self.name not in ("empty", "wrong shape") and _steps(cpu) != _steps(xla):
                return f"strides {xla.stride()} instead of {cpu.stride()}"
            if compare_values and (text := _value_difference(cpu, xla)):
                return text
        return self._memory_difference() if compare_values else ""

    def _error_difference(self) -> str:
        """Some CPU kernels write one place in memory many times without a word; xla always refuses."""
        cpu, xla = self.on_cpu, self.on_xla
        if self.name == "expanded":
            return "" if xla.kind in (RuntimeError, cpu.kind) else f"{xla} instead of {cpu}"
        return "" if cpu.kind is xla.kind else f"{xla} instead of {cpu}"

    @staticmethod
    def _resize_warnings(found: Outcome) -> int:
        return sum("resized" in text for text in found.warned)

    def _memory_difference(self) -> str:
        """Of memory that an `out=` shows a part of."""
        for cpu in tensors(self.given):
            base = cpu._base
            if base is None or self.name != "strides":
                continue
            storage = self.mirror.storages.get(base.untyped_storage().data_ptr())
            if storage is not None and (text := _value_difference(base, storage.view(base.shape))):
                return f"beside the tensor: {text}"
        return ""


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides of the dims that have a second element."""
    return [step for step, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]


def _value_difference(cpu: torch.Tensor, xla: torch.Tensor) -> str:
    expected, found = cpu.detach(), xla.detach().cpu()
    if expected.is_floating_point() and expected.element_size() == 1:  # of float8 only the bits can be compared
        expected, found = expected.float(), found.float()
    try:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return ""


def _trial(op: OpInfo, name: str, inputs: Any, result: Any) -> _Trial | None:
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, inputs)
    given_inputs = tensors((args, kwargs))
    if isinstance(result, torch.Tensor):
        given: Any = CASES[name](result, given_inputs)
    else:
        given = tuple(CASES[name](item, given_inputs) for item in result)
    if any(out is None for out in (given if isinstance(given, tuple) else [given])):
        return None
    mirror = Mirror()
    there_args, there_kwargs = mirror((args, kwargs))
    there = mirror(given)
    on_xla = outcome(op, *there_args, **there_kwargs, out=there)
    return _Trial(name, outcome(op, *args, **kwargs, out=given), on_xla, given, there, mirror)


def _check(op: OpInfo) -> None:
    inputs, result = _sample(op)
    # All cases are recorded before one is read: one program for each operator.
    trials = [trial for name in CASES if (trial := _trial(op, name, inputs, result)) is not None]
    wrong = []
    for trial in trials:
        text = trial.difference(compare_values=op.name not in NOT_COMPARED)
        reason = EXCEPTIONS.get((full_name(op), trial.name))
        if reason and not text:
            wrong.append(f"{trial.name}: nothing is wrong, but EXCEPTIONS says: {reason}")
        elif text and not reason:
            wrong.append(f"{trial.name}: {text}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op", [op for op in OPERATORS_WITH_OUT if full_name(op) in EVERYDAY], ids=full_name)
def test_out_of_an_everyday_operator(op: OpInfo) -> None:
    _check(op)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATORS_WITH_OUT, ids=full_name)
def test_out(op: OpInfo) -> None:
    _check(op)


# what the database does not say


def test_out_on_another_device_is_refused() -> None:
    x = torch.ones(3, device="xla")
    for function, args in ((torch.exp, (x,)), (torch.add, (x, x)), (torch.sort, (x,))):
        out = torch.sort(torch.ones(3)) if function is torch.sort else torch.ones(3)
        with pytest.raises(RuntimeError, match=r"device"):
            function(*args, out=out)
    with pytest.raises(RuntimeError, match=r"device"):
        torch.exp(torch.ones(3), out=torch.ones(3, device="xla"))


def test_out_that_shares_a_part_of_its_memory_with_an_input_is_refused() -> None:
    for device in ("cpu", "xla"):
        base = torch.arange(5.0).to(device)
        with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
            torch.neg(base[1:], out=base[:-1])
        assert base.tolist() == [0, 1, 2, 3, 4]
        torch.neg(base[:2], out=base[2:4])
        assert base.tolist() == [0, 1, 0, -1, 4]


def test_a_resized_view_grows_the_memory_behind_it() -> None:
    results = []
    for device in ("cpu", "xla"):
        base = torch.arange(6.0).to(device)
        part = base[4:]
        with pytest.warns(UserWarning, match="was resized"):
            torch.mul(torch.arange(4.0).to(device), 10, out=part)
        results.append((part.tolist(), base.tolist()))
    assert results[0] == results[1]


def test_results_in_the_dtype_of_out() -> None:
    """A sum into integers is a sum of integers; an operator without such a rule converts its result."""
    x = torch.tensor([0.6, 0.6, 0.6])
    for function in (torch.sum, torch.prod, torch.cumsum):
        args = (0,) if function is torch.cumsum else (0, False)
        expected = function(x, *args, out=torch.empty(0, dtype=torch.int64))
        found = function(x.to("xla"), *args, out=torch.empty(0, dtype=torch.int64, device="xla"))
        assert found.tolist() == expected.tolist()


# in-place operators follow the same rules for memory


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "copy_": lambda t: t.copy_(torch.ones(3, device=t.device)),
    "relu_": lambda t: t.relu_(),
    "scatter_": lambda t: t.scatter_(0, torch.tensor([1]).to(t.device), 1.0),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([1]).to(t.device), torch.ones(1, device=t.device)),
    "normal_": lambda t: t.normal_(),
}


@pytest.mark.parametrize("name", sorted(IN_PLACE))
def test_what_expand_makes_cannot_be_written(name: str) -> None:
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            IN_PLACE[name](torch.ones(1, device=device).expand(3))


def test_an_input_must_not_share_a_part_of_what_is_written() -> None:
    for device in ("cpu", "xla"):
        base = torch.arange(5.0).to(device)
        for write in (base[1:].add_, base[1:].copy_):
            with pytest.raises(RuntimeError, match="some elements of the input tensor"):
                write(base[:-1])
        base.add_(base)
        base[:2].add_(base[2:4])
        assert base.tolist() == [4, 8, 4, 6, 8]
