"""What every benchmark prints and writes: a table, the machine and the versions."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["finish", "table"]

_PACKAGES = ("torch", "jax", "jaxlib", "torch_xla", "torchax")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _machine() -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass  # not a Linux: the name above will do
    return {"cores": os.cpu_count(), "processor": model, "python": platform.python_version(), "versions": versions}


def finish(name: str, numbers: Any, file: str | None) -> None:
    """Print the machine, and write all of it as JSON if a file is named."""
    machine = _machine()
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    print(f"\n{machine['cores']} cores, {machine['processor']}, Python {machine['python']}, {versions}")
    if file is not None:
        Path(file).write_text(json.dumps({"benchmark": name, "machine": machine, "numbers": numbers}, indent=1) + "\n")
