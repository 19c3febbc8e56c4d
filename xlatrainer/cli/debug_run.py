"""Run a program with all debugging on, and pack what it wrote into an archive for a bug report.

    python -m xlatrainer debug-run --outfile report.tar.gz -- python script.py --epochs 1

The archive holds stdout and stderr, the analysis of compilations and executions, all graphs, a metrics report for each
step, versions and devices, and the environment without secrets. All of this slows the program down and writes much:
about a hundred steps are enough, Ctrl-C ends the program and still makes the archive. The exit code is the program's.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import IO, BinaryIO

from xlatrainer.cli import info

__all__ = ["add_arguments", "run"]

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
_IN_ADDRESSES = re.compile(r"(\w+://)[^/@\s]+@")  # a name and password before a host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("--outfile", required=True, metavar="FILE.tar.gz", help="the archive")
    parser.add_argument("--tidy", action="store_true", help="remove the folder that the files were collected in")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="the program with arguments"
    )


def run(options: argparse.Namespace) -> int:
    """Run the program; returns its exit code."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        print("debug-run: there is no program; write it behind --, such as `-- python script.py`", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="xlatrainer-debug-"))
    (folder / "info.txt").write_text(info.text(), encoding="utf-8")
    (folder / "environment.txt").write_text(_environment(), encoding="utf-8")
    (folder / "command.txt").write_text(" ".join(program) + "\n", encoding="utf-8")
    try:
        code = _run(program, folder)
    except FileNotFoundError as error:
        print(f"debug-run: {error}", file=sys.stderr)
        code = 127
    _pack(folder, Path(options.outfile))
    if options.tidy:
        shutil.rmtree(folder)
    else:
        print(f"debug-run: the files are in {folder}", file=sys.stderr)
    print(f"debug-run: wrote {options.outfile}", file=sys.stderr)
    return code


def _run(program: list[str], folder: Path) -> int:
    settings = {
        "PT_XLA_DEBUG": "1",
        "PT_XLA_DEBUG_FILE": str(folder / "analysis.txt"),
        "XLA_SAVE_TENSORS_FILE": str(folder / "graphs"),
        "XLA_METRICS_FILE": str(folder / "metrics.txt"),
        "XLA_IR_DEBUG": "1",
        "PYTHONUNBUFFERED": "1",
    }
    child = subprocess.Popen(program, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = signal.signal(signal.SIGINT, forward)
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        with child:
            copies = [
                threading.Thread(target=_copy, args=(child.stdout, sys.stdout, folder / "stdout.txt")),
                threading.Thread(target=_copy, args=(child.stderr, sys.stderr, folder / "stderr.txt")),
            ]
            for copy in copies:
                copy.start()
            for copy in copies:
                copy.join()
            code = child.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code  # a shell's number for a program that a signal ended


def _copy(source: IO[bytes], shown: IO[str], path: Path) -> None:
    with path.open("wb") as file:
        for line in source:
            file.write(line)
            file.flush()
            shown.write(line.decode(errors="replace"))
            shown.flush()


def _environment() -> str:
    lines = []
    for name, value in sorted(os.environ.items()):
        hidden = "(hidden)" if _SECRET.search(name) else _IN_ADDRESSES.sub(r"\1(hidden)@", value)
        lines.append(f"{name}={hidden}\n")
    return "".join(lines)


def _pack(folder: Path, archive: Path) -> None:
    temporary = archive.with_name(f".{archive.name}.{os.getpid()}.tmp")
    file: BinaryIO
    with temporary.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz") as packed:
        for path in sorted(folder.iterdir()):
            packed.add(path, arcname=f"xlatrainer-debug/{path.name}")
    os.replace(temporary, archive)
