"""Every operator of torch's own operator database on `xla` against the CPU.

For each operator and dtype: up to ten samples, each compared in value, dtype and shape, on inputs with other strides,
in its in-place form, and for float32 and complex64 in its gradients and, for the first ones, the gradients' own. The
operators of everyday models run always, with fewer samples; the whole database is marked slow:

    make operators

prints at its end how many operators are right, which of them the CPU helped, and which lowerings nothing reached (in
this folder's `conftest.py`). What differs stands in `opinfo_tables.py`, each entry with its reason.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.backend.opinfo_compare import difference
from tests.backend.opinfo_database import OPERATORS, OpInfo, full_name
from tests.backend.opinfo_extra import BY_SCHEMA, CALLS, arguments_by_schema
from tests.backend.opinfo_samples import DTYPES, Outcome, Way, check, exclusions, to_xla
from tests.backend.opinfo_tables import CANONICAL, EVERYDAY, EXCLUDED, FREE, LOOSE, RELEASE, STAYS_ON_CPU
from xlatrainer.backend.lowerings.registry import registered, resolve
from xlatrainer.backend.recorder import Recorder
from xlatrainer.backend.state import state

# Samples come with warnings of torch's own, and an operator without a lowering warns that it runs on the CPU.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 10
CASES = [(op, dtype) for op in OPERATORS for dtype in DTYPES if dtype in op.dtypes]

EVERYDAY_SAMPLES = 3
EVERYDAY_CASES = [(op, dtype) for op, dtype in CASES if op.name in EVERYDAY and dtype in DTYPES[:3]]


def _case_name(part: OpInfo | torch.dtype) -> str:
    return full_name(part) if isinstance(part, OpInfo) else str(part).removeprefix("torch.")


def _judge(op: OpInfo, dtype: torch.dtype, outcome: Outcome, strict: bool) -> None:
    """Fail for what differs and is not listed, and for what is listed and does not differ."""
    listed = exclusions(op, dtype)
    unlisted = [f for f in outcome.failures if not any(entry.covers(dtype, f.way.name) for entry in listed)]
    assert not unlisted, "\n".join([f"{len(unlisted)} differences", *map(str, unlisted)])
    if strict:
        for entry in (entry for entry in listed if not entry.by_chance):
            fails = any(entry.covers(dtype, failure.way.name) for failure in outcome.failures) or not outcome.ran
            assert fails, f"it is right now: remove from EXCLUDED {full_name(op)}, {dtype}: {entry.reason}"
        assert outcome.ran or listed, "the CPU accepts no sample: nothing was compared"


@pytest.fixture(autouse=True)
def _forget_programs() -> Iterator[None]:
    """Programs of thousands of cases would use up the memory maps that a process may have."""
    yield
    state.forget_programs()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the lowerings that were recorded during the test, so far."""
    names: list[str] = []
    original = Recorder.record

    def record(self: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.lowering.name not in names:
            names.append(self.lowering.name)
        return original(self, args, kwargs)

    monkeypatch.setattr(Recorder, "record", record)
    return names


@pytest.mark.parametrize(("op", "dtype"), EVERYDAY_CASES, ids=_case_name)
def test_everyday_operator(op: OpInfo, dtype: torch.dtype) -> None:
    _judge(op, dtype, check(op, dtype, EVERYDAY_SAMPLES), strict=False)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=_case_name)
def test_operator(op: OpInfo, dtype: torch.dtype, record_property: Any, reached: list[str]) -> None:
    case = {
        "operator": full_name(op),
        "dtype": _case_name(dtype),
        "excluded": bool(exclusions(op, dtype)),
        "free": op.name in FREE,
        "fallbacks": [],
        "lowerings": reached,
        "cases": len(CASES),
    }
    record_property("operator case", case)  # now, lest a case that fails be missing; the report has what it holds then
    outcome = check(op, dtype, SAMPLES)
    case["fallbacks"] = outcome.fallbacks
    _judge(op, dtype, outcome, strict=torch.__version__.startswith(f"{RELEASE}."))


EXTRA = [*BY_SCHEMA, *CALLS]


@pytest.mark.parametrize("name", EXTRA)
def test_what_the_database_does_not_reach(name: str, record_property: Any, reached: list[str]) -> None:
    record_property("extra lowerings", {"lowerings": reached, "cases": len(EXTRA)})  # first: see test_operator
    overload = resolve(name)
    function, inputs = (overload, arguments_by_schema(overload)) if name in BY_SCHEMA else CALLS[name]
    expected = function(*tree_map(_clone, inputs))
    actual = function(*tree_map(to_xla, inputs))
    text = difference(name, actual, expected, lambda: None)
    assert not text, text
    assert f"aten::{name}" in reached or f"aten::{name}" not in registered()


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def test_tables_name_operators_of_the_database() -> None:
    names = {op.name for op in OPERATORS} | {full_name(op) for op in OPERATORS}
    ways = {way.name for way in Way}
    unknown = [
        name for table in (EXCLUDED, FREE, LOOSE, CANONICAL, STAYS_ON_CPU) for name in table if name not in names
    ]
    unknown += [name for name in EVERYDAY if name not in names]
    assert not unknown
    assert all(set(entry.ways) <= ways for entries in EXCLUDED.values() for entry in entries)
