"""Programs that are not used give their code back, and get it again when they are."""

import gc
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

import xlatrainer as xla
from xlatrainer import config
from xlatrainer.backend import counters, loaded
from xlatrainer.backend.program import Program, live_programs

WIDTHS = count(61)


@pytest.fixture
def width() -> Iterator[int]:
    """A size of which nothing is compiled yet, and the programs of other tests out of the way."""
    xla.sync()
    before = dict(loaded._Order.programs)
    loaded._Order.programs.clear()
    counters.reset()
    yield next(WIDTHS)
    for program, use in before.items():
        loaded._Order.programs[program] = use


def run(width: int, number: int) -> float:
    """Run one of many programs."""
    x = torch.full((width, 2), 0.5).to("xla")
    for _ in range(number):
        x = x.cos()
    return float(x.sum().item())


def are_loaded() -> int:
    return len(loaded._Order.programs)


def test_the_least_recently_used_goes(width: int) -> None:
    with config.override(max_loaded_programs=3):
        for number in (1, 2, 3):
            run(width, number)
        run(width, 1)
        run(width, 4)  # in the place of 2
        assert counters.snapshot() | {"ProgramRelease": 1, "UncachedCompile": 4} == counters.snapshot()
        for number in (1, 3, 4):
            run(width, number)
        assert counters.value("UncachedCompile") == 4
        assert run(width, 2) == pytest.approx(run(width, 2))
        assert counters.value("UncachedCompile") == 5
        assert are_loaded() == 3


def test_one_that_gave_its_code_back_gives_the_same(width: int) -> None:
    with config.override(max_loaded_programs=1):
        first = [run(width, number) for number in (1, 2, 3)]
        assert [run(width, number) for number in (1, 2, 3)] == first
    assert are_loaded() == 1
    assert counters.value("CachedCompile") == 3  # the graphs were known


def test_it_comes_back_from_the_disk(width: int, tmp_path: Path) -> None:
    with config.override(max_loaded_programs=1, cache_dir=str(tmp_path)):
        first = [run(width, number) for number in (1, 2)]
        assert counters.value("UncachedCompile") == 2
        assert [run(width, number) for number in (1, 2)] == first
    assert counters.value("UncachedCompile") == 2
    assert counters.value("PersistentCacheHit") == 2


def test_a_replayed_step_and_several_in_one(width: int) -> None:
    weight = torch.ones(width).to("xla")
    step = xla.compile(lambda batch: (batch * weight).sum() + weight[0])
    batches = [(torch.full((width,), float(number)).to("xla"),) for number in range(3)]
    expected = [float(number * width + 1) for number in range(3)]
    with config.override(max_loaded_programs=1):
        for _ in range(3):
            assert [step(*batch).item() for batch in batches] == expected
        assert step.step.reason == ""
        for number in (1, 2):
            run(width, number)
            assert [step(*batch).item() for batch in batches] == expected
            assert [result.item() for result in step.step.many(batches)] == expected
        assert step.step.reason == ""
    assert are_loaded() == 1


def test_its_checks_and_sizes_stay(width: int) -> None:
    table = torch.ones(width, 2).to("xla")
    with config.override(max_loaded_programs=1):
        for _ in range(2):
            with pytest.raises(IndexError, match="out of range"):
                torch.nn.functional.embedding(torch.tensor([width]).to("xla"), table).cpu()
            run(width, 1)
    released = [p for p in live_programs() if p._loaded is None and p.checks]
    assert released
    assert all(set(p.memory_sizes()) == {"arguments", "outputs", "donated", "temporaries", "code"} for p in released)


def test_memory_maps_are_watched(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many as there are now allowed, a look finds it crowded: half of the programs go, and their maps."""
    for number in range(1, 11):
        run(width, number)
    gc.collect()
    maps = Path("/proc/self/maps")
    before = maps.read_text().count("\n")
    limit = tmp_path / "max_map_count"
    limit.write_text(str(before))
    monkeypatch.setattr(loaded, "_MAX_MAPS", limit)
    monkeypatch.setattr(loaded, "_LOOK_EVERY", 1)
    loaded.make_room()
    gc.collect()
    assert are_loaded() == 5
    assert counters.value("ProgramRelease") == 5
    assert maps.read_text().count("\n") < before
    limit.write_text(str(10 * before))
    loaded.make_room()
    assert are_loaded() == 5


def test_without_such_a_limit_nothing_goes(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(width, 1)
    monkeypatch.setattr(loaded, "_MAX_MAPS", tmp_path / "no such file")
    monkeypatch.setattr(loaded, "_LOOK_EVERY", 1)
    loaded.make_room()
    assert are_loaded() == 1
    assert all(isinstance(program, Program) for program in loaded._Order.programs)
