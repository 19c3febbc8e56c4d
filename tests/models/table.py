"""Writes the records of a run into the table of docs/models.md, between two marks; the text around it stays.

Rows of models that the run left out stay too, as long as they come from the same versions.
"""

import importlib.metadata
from pathlib import Path
from typing import NamedTuple

from tests.models.harness import STEPS, TOLERANCE, Record

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
LIBRARIES = ("torchvision", "transformers", "timm")
HEAD = (
    "Model", "Parameters", "dtype", "Right", "Eval", "Loss", "Gradient", "Programs", "Operators", "First step (s)",
    "On the CPU",
)  # fmt: skip


class Row(NamedTuple):
    """One result: the library, what was found, and whether the test passed."""

    library: str
    record: Record
    passed: bool


def versions() -> str:
    """The line that says with which releases the table was made."""
    names = ("torch", "jax", *LIBRARIES)
    return "With " + ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names) + "."


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.0e}"


def _cells(row: Row) -> list[str]:
    record = row.record
    name = f"{record.name} ({record.note})" if record.note else record.name
    fallbacks = ", ".join(f"`{name}` {count}x" for name, count in sorted(record.fallbacks.items()))
    dtype = record.dtype
    if record.own_deviation == record.own_deviation:
        dtype += f" (CPU {_number(record.own_deviation)})"
    return [
        name,
        f"{record.parameters:,}",
        dtype,
        "yes" if row.passed else "**no**",
        *map(_number, (record.eval_deviation, record.loss_deviation, record.gradient_deviation)),
        str(record.programs),
        str(record.nodes or "-"),
        "-" if record.first_step != record.first_step else f"{record.first_step:.0f}",
        fallbacks,
    ]


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _old_rows(table: str) -> dict[str, dict[str, str]]:
    """Lines of a table by library and model; none if they come from other versions."""
    found: dict[str, dict[str, str]] = {library: {} for library in LIBRARIES}
    library = ""
    for line in table.splitlines() if versions() in table else []:
        if line.startswith("### "):
            library = line.removeprefix("### ")
        elif line.startswith("| ") and not line.startswith((f"| {HEAD[0]}", "| ---")):
            found[library][line.split(" ")[1]] = line
    return found


def write_table(path: Path, rows: list[Row]) -> None:
    """Put `rows` into the table of the file at `path`; raises `ValueError` if it has no marks."""
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path} has no {BEGIN} and {END}: the table stands between them")
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    lines = _old_rows(table)
    for row in rows:
        lines[row.library][row.record.name] = _line(_cells(row))
    parts = [versions(), f"Tolerance {TOLERANCE:g} relative, {STEPS} steps."]
    for library in LIBRARIES:
        if lines[library]:
            parts += ["", f"### {library}", "", _line(HEAD), _line(["---"] * len(HEAD)), *lines[library].values()]
    path.write_text(before + "\n".join([BEGIN, *parts, END]) + after, encoding="utf-8")
