"""The rules of this repository that ruff and mypy cannot express. Run by scripts/check; prints what to change.

- No path of somebody's machine in a tracked file.
- A TODO names its issue: `TODO(#12): ...`.
- F811 (a redefinition), PT012 (several statements under `pytest.raises`) are never waived.
- A waived BLE001 (a broad `except` without re-raise) says why: `# noqa: BLE001 - reason`.
- Relative links in Markdown lead to a file.
- A changelog fragment is named `<issue>.<kind>.md`, or `+<slug>.<kind>.md` where there is no issue.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THIS_FILE = "scripts/house_rules.py"  # spells out what it looks for

LINE_RULES: list[tuple[re.Pattern[str], str]] = [
    (
        re.compile(r"(?<![\w.~:/-])/(?:home|Users|root|tmp|work)/\w"),
        "a path of one machine; make it relative or an argument",
    ),
    (re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!\(#\d+\))"), "a TODO needs its issue: TODO(#12): what is to do"),
    (re.compile(r"#\s*noqa(?!:)", re.IGNORECASE), "name the rule that is waived: noqa: CODE"),
    (re.compile(r"#\s*noqa:.*\b(?:F811|PT012)\b"), "F811 and PT012 are never waived; change the code"),
    (re.compile(r"#\s*noqa:[\s\w,]*\bBLE001\b(?!\s*-\s*\w)"), "say why: noqa: BLE001 - reason"),
    (re.compile(r"#\s*type:\s*ignore(?!\[)"), "name the error that is ignored: type: ignore[code]"),
]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
FRAGMENT = re.compile(r"(?:\d+|\+[\w-]+)\.(?:added|changed|fixed|removed)(?:\.\d+)?\.md")


def tracked_files() -> list[str]:
    """Paths, relative to the root, of what git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted({name for name in names if name and (ROOT / name).is_file()})


def violations(name: str, text: str) -> Iterator[str]:
    """What `text`, the content of the file `name`, has against the rules, as `file:line: what`."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, message in LINE_RULES:
            if pattern.search(line):
                yield f"{name}:{number}: {message}"
        if name.endswith(".md"):
            for target in LINK.findall(line):
                if not ((ROOT / name).parent / target).exists():
                    yield f"{name}:{number}: the link to {target} leads nowhere"
    folder, _, file = name.rpartition("/")
    if folder == "changelog.d" and file != "README.md" and not FRAGMENT.fullmatch(file):
        yield f"{name}: name it <issue>.<added|changed|fixed|removed>.md"


def main() -> int:
    """Check every tracked text file; the exit status is 1 where something was found."""
    found: list[str] = []
    for name in tracked_files():
        if name == THIS_FILE:
            continue
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not a text file
        found.extend(violations(name, text))
    print("\n".join(found) if found else "no violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
