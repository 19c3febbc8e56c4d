"""What every benchmark prints and writes: a table, the machine and the versions."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["finish", "table"]

_PACKAGES = ("torch", "jax", "jaxlib", "torch_xla", "torchax")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


_VERSIONS = """
import json, sys
from importlib import metadata
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        continue
print(json.dumps(found))
"""


def _versions(python: str) -> dict[str, str]:
    """Of an interpreter and its packages."""
    done = subprocess.run([python, "-c", _VERSIONS, *_PACKAGES], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass  # not a Linux: the name above will do
    return {"cores": os.cpu_count(), "processor": model}


def finish(name: str, numbers: Any, file: str | None, peers: Mapping[str, str] | None = None) -> None:
    """Print the machine and the versions of all, and write it as JSON if a file is named.

    Args:
        name: Of the benchmark.
        numbers: What it found, as JSON takes it.
        file: To write to, if any.
        peers: The interpreter of each peer that took part; without it, all ran in this one.
    """
    machine = _machine()
    pythons = dict.fromkeys((peers or {"": sys.executable}).values())
    versions = {
        ", ".join(p for p, path in (peers or {}).items() if path == python): _versions(python) for python in pythons
    }
    print(f"\n{machine['cores']} cores, {machine['processor']}")
    for who, found in versions.items():
        print(f"{who or 'here'}: {', '.join(f'{package} {version}' for package, version in found.items())}")
    if file is not None:
        text = json.dumps({"benchmark": name, "machine": machine, "versions": versions, "numbers": numbers}, indent=1)
        Path(file).write_text(text + "\n")
