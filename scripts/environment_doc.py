"""Writes docs/environment.md from the table of settings, or says whether it is current.

python scripts/environment_doc.py [--check]
"""

import argparse
import sys
from pathlib import Path

from xlatrainer.config import SETTINGS, Setting

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "environment.md"

HEAD = """# Environment variables

Written by `python scripts/environment_doc.py` from the table in `xlatrainer/config.py`, which is the only reader of the
environment. A variable is read when its setting is needed, so one that a program sets late still counts, unless its row
says otherwise. A value that is not accepted is an error that names the accepted ones.

| Variable | Default | What it sets | Accepted |
| --- | --- | --- | --- |
"""

TAIL = """
JAX and XLA read their own (`XLA_FLAGS`, `JAX_PLATFORMS`, ...), which are left alone. Variables of PyTorch/XLA that are
not in the table have no effect.
"""


def text() -> str:
    """The page."""
    return HEAD + "".join(map(_row, sorted(SETTINGS.values(), key=lambda setting: setting.variable))) + TAIL


def _row(setting: Setting) -> str:
    accepted = ", ".join(f"`{value}`" for value in setting.accepted) or type(setting.default).__name__
    default = f"`{setting.default}`" if setting.default != "" else "empty"
    others = [f"`{variable}`" for variable, _ in setting.also]
    meaning = setting.meaning + (f" (also {', '.join(others)})" if others else "")
    return f"| `{setting.variable}` | {default} | {meaning} | {accepted} |\n"


def main() -> int:
    """Write the file, or with `--check` compare it."""
    parser = argparse.ArgumentParser(description="writes docs/environment.md")
    parser.add_argument("--check", action="store_true", help="only say whether the file is current")
    arguments = parser.parse_args()
    current = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    if arguments.check:
        print("current" if current == text() else f"{FILE.relative_to(ROOT)} is out of date: run this without --check")
        return int(current != text())
    FILE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
