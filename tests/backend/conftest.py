"""After a run of the whole operator suite (`make operators`): what it came to, over all worker processes.

Each case of `test_operator` says in a property of its report what it tried; workers send their reports to the process
that prints.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from xlatrainer.backend.lowerings.registry import registered

MEASURED = ("float32", "int64", "bool")  # an operator is all right if it is in these, with gradients in the first


def _cases(config: pytest.Config, name: str = "operator case") -> list[dict[str, Any]]:
    """What the cases that ran say of themselves in the property `name`, with their outcome."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports: Iterable[Any] = [
        r for outcome in ("passed", "failed") for r in reporter.stats.get(outcome, ()) if hasattr(r, "user_properties")
    ]
    return [
        {**value, "passed": report.passed}
        for report in reports
        for key, value in report.user_properties
        if key == name and report.when == "call"
    ]


def _parts(config: pytest.Config) -> list[list[dict[str, Any]]]:
    """The cases of the database and those beside it."""
    return [_cases(config, name) for name in ("operator case", "extra lowerings")]


def _whole(parts: list[list[dict[str, Any]]]) -> bool:
    """Whether every case said what it reached, right or wrong."""
    return all(part and len(part) == part[0]["cases"] for part in parts)


def _unreached(config: pytest.Config) -> list[str]:
    """Lowerings that no case reached; empty unless the whole suite ran."""
    parts = _parts(config)
    if not _whole(parts):
        return []
    reached = {name for part in parts for case in part for name in case["lowerings"]}
    return sorted(registered().keys() - reached)


def _right(case: dict[str, Any]) -> bool:
    return case["passed"] and not case["excluded"]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    printing = session.config.pluginmanager.has_plugin("terminalreporter")  # not so in a worker
    if printing and session.exitstatus == pytest.ExitCode.OK and _unreached(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    cases = _cases(config)
    if not cases:
        return
    write = terminalreporter.write_line
    terminalreporter.section("operators")
    by_operator: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case in cases:
        if case["dtype"] in MEASURED:
            by_operator[case["operator"]].append(case)
    right = [name for name, own in by_operator.items() if all(map(_right, own))]
    free = [name for name in right if by_operator[name][0]["free"]]
    helped = {name: sorted({f for case in own for f in case["fallbacks"]}) for name, own in by_operator.items()}
    helped = {name: fallbacks for name, fallbacks in helped.items() if fallbacks}
    share = 100 / max(len(by_operator), 1)
    write(
        f"all right in {', '.join(MEASURED)}: {len(right)} of {len(by_operator)} ({len(right) * share:.1f}%), "
        f"{len(free)} of them by shape and dtype alone, since their values are random or undefined"
    )
    write(f"with help of the CPU: {len(helped)} ({len(helped) * share:.1f}%)")
    for name, fallbacks in sorted(helped.items()):
        write(f"  {name}: {', '.join(fallbacks)}")
    write("not all right: " + (", ".join(sorted(by_operator.keys() - set(right))) or "none"))
    for dtype in sorted({case["dtype"] for case in cases}):
        tried = [case for case in cases if case["dtype"] == dtype]
        write(f"{dtype}: {sum(map(_right, tried))} of {len(tried)} operators right")
    parts = _parts(config)
    if not _whole(parts):
        ran = " and ".join(f"{len(part)} of {part[0]['cases']}" if part else "none" for part in parts)
        write(f"not looked at: whether every lowering is reached, since not every case ran ({ran})")
    if unreached := _unreached(config):
        write(f"lowerings that nothing reached, which fails the run: {', '.join(unreached)}", red=True)
