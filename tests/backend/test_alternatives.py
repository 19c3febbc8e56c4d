"""Operators that have several forms, with each form forced on whatever the shape: all of them are right.

The forms that other platforms take are among them: XLA's CPU runs those too.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.backend.opinfo_database import OPERATORS, OpInfo, full_name
from tests.backend.opinfo_samples import check, exclusions
from xlatrainer.backend.lowerings import attention, convolution_cpu, convolution_spans, fusion, leading_axes, platforms
from xlatrainer.backend.state import state

pytestmark = pytest.mark.filterwarnings("ignore")  # samples come with warnings of torch's own

SAMPLES = 4
_EVERY, _NONE = 10**9, 0


def _functions(names: str) -> list[str]:
    return [f"nn.functional.{name}" for name in names.split()]


_CONVOLUTIONS = _functions("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
_POOLING = _functions("max_pool1d max_pool2d max_pool3d avg_pool2d avg_pool3d adaptive_avg_pool2d")
_IMAGES = [*_POOLING, *_functions("batch_norm layer_norm relu linear"), "matmul"]
_ATTENTION = _functions("scaled_dot_product_attention")
_SUMS = ["sum", "mean", "norm", "linalg.vector_norm", "logsumexp", "var", "std", "var_mean", "std_mean"]
_REDUCTIONS = [*_SUMS, "amax", "amin", "aminmax"]

Patch = Callable[[pytest.MonkeyPatch], None]


def _constants(module: Any, **values: Any) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    return patch


def _patches(*patches: Patch) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for each in patches:
            each(monkeypatch)

    return patch


def _none(*args: Any, **kwargs: Any) -> None:
    return None


def _as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "lowered_for", lambda: "another")


_UNFOLDED = {"MOST_TAPS": _EVERY, "MOST_COLUMNS": _EVERY, "MOST_INDICES": _EVERY}

ALTERNATIVES: dict[str, tuple[Patch, list[str]]] = {
    "XLA's own convolution": (
        _constants(convolution_cpu, forward=_none, input_gradient=_none, weight_gradient=_none),
        _CONVOLUTIONS,
    ),
    "unfolded convolution, rows": (_constants(convolution_cpu, FEW_POSITIONS=_NONE, **_UNFOLDED), _CONVOLUTIONS),
    "unfolded convolution, columns": (_constants(convolution_cpu, FEW_POSITIONS=_EVERY, **_UNFOLDED), _CONVOLUTIONS),
    "unfolded convolution, in spans": (
        _patches(
            _constants(convolution_cpu, MOST_COLUMNS=_NONE), _constants(convolution_spans, FEW_CHANNELS=1, AT_ONCE=50)
        ),
        _CONVOLUTIONS,
    ),
    "convolution without sums over taps": (
        _constants(convolution_cpu, MOST_TAPS=_NONE, MOST_DEPTHWISE_TAPS=_NONE),
        _CONVOLUTIONS,
    ),
    "attention at once": (_constants(attention, _LONG=_EVERY), _ATTENTION),
    "attention in blocks": (_constants(attention, _LONG=1, _AT_ONCE=1), _ATTENTION),
    "causal attention at once": (_constants(attention, _SHORTEST_SPAN=_EVERY), _ATTENTION),
    "causal attention in spans": (_constants(attention, _SHORTEST_SPAN=1), _ATTENTION),
    "causal attention in spans and blocks": (
        _constants(attention, _SHORTEST_SPAN=1, _LONG=1, _AT_ONCE=1),
        _ATTENTION,
    ),
    "channels innermost": (_constants(fusion, FEW_CHANNELS=1), [*_CONVOLUTIONS, *_IMAGES, "cat"]),
    "channels as they are": (_constants(fusion, FEW_CHANNELS=_EVERY), [*_CONVOLUTIONS, *_IMAGES, "cat"]),
    "rows combined, however short": (_constants(leading_axes, LONG_ROW=1), _REDUCTIONS),
    "the forms of other platforms": (_as_elsewhere, [*_CONVOLUTIONS, *_IMAGES, *_ATTENTION]),
}


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """Programs are found by what was recorded, which says nothing of the forms."""
    state.forget_programs()
    yield
    state.forget_programs()


def _operators(names: list[str]) -> list[OpInfo]:
    found = [op for op in OPERATORS if op.name in names and not op.variant_test_name]
    assert {op.name for op in found} == set(names)
    return found


CASES = [(form, op) for form, (_, names) in ALTERNATIVES.items() for op in _operators(names)]


@pytest.mark.parametrize(("form", "op"), CASES, ids=lambda part: full_name(part) if isinstance(part, OpInfo) else part)
def test_form(form: str, op: OpInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    ALTERNATIVES[form][0](monkeypatch)
    outcome = check(op, torch.float32, SAMPLES)
    listed = exclusions(op, torch.float32)
    assert outcome.ran
    assert not [f for f in outcome.failures if not any(entry.covers(torch.float32, f.way.name) for entry in listed)]
