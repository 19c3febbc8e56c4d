"""Real models are compared on request only: `make test-models`. Also writes the table of docs/models.md."""

import dataclasses
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.models.harness import Case, Record, check, compare
from tests.models.table import Row, write_table
from xlatrainer.backend.program import live_programs

Compare = Callable[[Case], None]


def _wants_models(config: pytest.Config) -> bool:
    expression = config.getoption("markexpr")
    return "models" in expression and "not models" not in expression


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", metavar="FILE", type=Path, help="put the results into the table of this file")


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """The libraries take seconds to import: only when asked for."""
    return None if _wants_models(config) else True


@pytest.fixture(autouse=True)
def _forget_programs() -> Iterator[None]:
    """The code of a model's programs is not needed any more, and takes memory."""
    yield
    for program in live_programs():
        program.release()
    gc.collect()


@pytest.fixture
def compared(record_property: Callable[[str, object], None]) -> Compare:
    """Compares a case, checks it, and hands the record to the table."""

    def run(case: Case) -> None:
        record = compare(case)
        print(record)
        record_property("model", json.dumps(dataclasses.asdict(record)))
        check(case, record)

    return run


class _Table:
    """Gathers the records of all reports, those of parallel workers included, and writes the table at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "call" else []:
            if name == "model":
                library = Path(report.location[0]).stem.removeprefix("test_")
                self.rows.append(Row(library, Record(**json.loads(str(value))), report.passed))

    def pytest_sessionfinish(self) -> None:
        if self.rows:
            write_table(self.path, self.rows)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("write_table", None)
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Table(path))
