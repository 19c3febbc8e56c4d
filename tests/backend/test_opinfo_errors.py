"""Wrong calls of every operator of torch's database: where the CPU raises, `xla` raises the same type, at the call.

What counts as the same error: the type is the CPU's, and the message is as clear. It is if it matches the database's
pattern for the CPU's message, contains the CPU's first line, begins with the same function's name and its arguments, or
says which operator (`aten::...`) or which dtype was refused.

- The wrong arguments that torch's database lists, `error_inputs`.
- Dtypes that the CPU's kernels do not take: of all samples of all dtypes those that the CPU refuses.

What depends on data (an index out of range) is raised when a result is read: `ON_READING`; test_checks.py has more.
A row in a table of exceptions whose operator does nothing wrong fails the test.
"""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.backend.opinfo_database import OPERATORS, OpInfo, full_name, tensors
from tests.backend.outcomes import Mirror, Outcome, outcome
from xlatrainer.backend.state import state

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
SAMPLES = 3  # of each operator and dtype

# Wrong inputs that depend on data: found when the program runs.
ON_READING = frozenset({"gather", "scatter", "scatter_add"})

WRONG_INPUTS_EXCEPTIONS: dict[str, str] = {}

_HALF = "half precision, which torch takes on CUDA though not on the CPU, is trained in on GPU and TPU"
DTYPE_EXCEPTIONS = {
    "histc": "of integers, which torch takes on CUDA though not on the CPU, and transformers counts on it",
    "max_pool2d_with_indices_backward": "autograd calls gradients with the dtypes that the operator took",
    "nn.functional.max_pool1d": "of integers, which torch makes of max_pool2d on other devices than the CPU",
    "_upsample_bilinear2d_aa": _HALF,
    "nn.functional.avg_pool3d": _HALF,
    "nn.functional.dropout": "of complex numbers; it is one operator here, which torch makes of others on the CPU",
    "nn.functional.multi_margin_loss": _HALF,
    "nn.functional.multilabel_margin_loss": _HALF,
    "nn.functional.rrelu": _HALF,
}
# Minutes for samples that show nothing.
SLOW_SAMPLES = frozenset({"svd_lowrank", "pca_lowrank"})


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """What a wrong call left to be raised at a later read is not the next test's."""
    yield
    with state.lock:
        state.new_trace()
        state.checks.clear()


_CLEAR = re.compile(r"aten::\w+|not implemented for '\w+'")


def _as_clear(mine: Exception, cpu: Exception, pattern: str | None) -> bool:
    message, reference = str(mine), str(cpu)
    if pattern is not None and re.search(pattern, message):
        return True
    first = (reference.splitlines() or [""])[0]
    return first in message or message.startswith(f"{first.partition('(')[0]}(") or bool(_CLEAR.search(message))


def _difference(on_xla: Outcome, on_cpu: Outcome, pattern: str | None = None) -> str:
    """What is wrong with the error, as text; empty if it is the CPU's."""
    if on_xla.error is None or on_cpu.error is None or on_xla.kind is not on_cpu.kind:
        return f"{on_xla} instead of {on_cpu}"
    if not _as_clear(on_xla.error, on_cpu.error, pattern):
        return f"less clear: {on_xla} instead of {on_cpu}"
    return ""


def _call(op: OpInfo, inputs: Any) -> Outcome:
    args, kwargs = inputs
    return outcome(op, *args, **kwargs)


def _reading(result: Any) -> Outcome:
    return outcome(lambda: [tensor.cpu() for tensor in tensors(result)])


def _on_xla(inputs: Any) -> Any | None:
    """The inputs on the device; None for what cannot be there: meta tensors, more than 64 dims, sparse layouts."""
    given = tensors(inputs)
    if any(t.device.type != "cpu" or t.dim() > 64 or t.layout is not torch.strided for t in given):
        return None
    return Mirror()(inputs)


@pytest.mark.parametrize("op", [op for op in OPERATORS if op.error_inputs_func is not None], ids=full_name)
def test_wrong_inputs(op: OpInfo, request: pytest.FixtureRequest) -> None:
    if reason := WRONG_INPUTS_EXCEPTIONS.get(full_name(op)):
        request.applymarker(pytest.mark.xfail(reason=reason))
    wrong, read = [], 0
    for case in op.error_inputs("cpu"):
        sample = case.sample_input
        inputs = ((sample.input, *sample.args), sample.kwargs)
        there = _on_xla(inputs)
        on_cpu = _call(op, inputs)
        if there is None or on_cpu.error is None:
            continue
        on_xla = _call(op, there)
        if on_xla.error is None and op.name in ON_READING:
            on_xla = _reading(on_xla.result)
            read += 1
        if text := _difference(on_xla, on_cpu, case.error_regex):
            wrong.append(text)
    assert not wrong, "\n".join(wrong)
    assert op.name not in ON_READING or read, "nothing was raised when it was read"


def _samples(op: OpInfo, dtype: torch.dtype) -> Iterator[Any]:
    """Inputs of samples, also of dtypes for which the database makes none, where it can."""
    try:
        for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=False), SAMPLES):
            if op.is_factory_function:
                sample.kwargs["device"] = torch.device("cpu")
            yield (sample.input, *sample.args), sample.kwargs
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
        return


@pytest.mark.parametrize("op", [op for op in OPERATORS if op.name not in SLOW_SAMPLES], ids=full_name)
def test_refused_dtypes(op: OpInfo, request: pytest.FixtureRequest) -> None:
    if reason := DTYPE_EXCEPTIONS.get(full_name(op)):
        request.applymarker(pytest.mark.xfail(reason=reason))
    wrong = {}
    for dtype in DTYPES:
        for inputs in _samples(op, dtype):
            on_cpu = _call(op, tree_map(lambda leaf: leaf, inputs))
            # a call that was refused has left its inputs alone, and most calls are not refused
            there = None if on_cpu.error is None else _on_xla(inputs)
            if there is None:
                continue
            if text := _difference(_call(op, there), on_cpu):
                wrong[f"{dtype}: {text}"] = None
    assert not wrong, "\n".join(wrong)
