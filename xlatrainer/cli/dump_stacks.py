"""Show where the threads of a running process stand, equal stacks once.

Uses py-spy where it is installed, which can look into any Python process of yours. Without it, a process that has
called `xlatrainer.debug.enable_stack_dumps()` is asked to write its stacks to its own stderr.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

__all__ = ["add_arguments", "grouped", "run"]

INSTALL = "pip install py-spy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("pid", type=int, metavar="PID", help="the process")


def run(options: argparse.Namespace) -> int:
    """Show the stacks; returns 1 if that cannot be."""
    try:
        os.kill(options.pid, 0)
    except ProcessLookupError:
        print(f"dump-stacks: there is no process {options.pid}", file=sys.stderr)
        return 1
    spy = shutil.which("py-spy")
    if spy is not None:
        done = subprocess.run([spy, "dump", "--pid", str(options.pid)], capture_output=True, text=True, check=False)
        print(grouped(done.stdout), end="")
        sys.stderr.write(done.stderr)
        return done.returncode
    if _handles(options.pid, signal.SIGUSR1):
        os.kill(options.pid, signal.SIGUSR1)
        print(f"dump-stacks: process {options.pid} writes its stacks to its stderr; `{INSTALL}` to see them here")
        return 0
    print(
        f"dump-stacks: py-spy is not installed (`{INSTALL}`), and process {options.pid} has not called "
        "xlatrainer.debug.enable_stack_dumps()",
        file=sys.stderr,
    )
    return 1


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal: one without would be ended by it."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return False
    caught = next((line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def grouped(dump: str) -> str:
    """What py-spy writes, with the threads of equal stacks together, the most frequent first.

    Example:
        >>> print(grouped('Thread 1 (idle)\\n    f (a.py:1)\\nThread 2 (idle)\\n    f (a.py:1)\\n'), end='')
        STACK (count=2): Thread 1 (idle), Thread 2 (idle)
            f (a.py:1)
    """
    head: list[str] = []
    threads: list[tuple[str, str]] = []
    for line in dump.splitlines():
        if line.startswith("Thread "):
            threads.append((line, ""))
        elif threads:
            name, stack = threads[-1]
            threads[-1] = (name, f"{stack}{line}\n" if line.strip() else stack)
        else:
            head.append(line)
    counts = Counter(stack for _, stack in threads)
    lines = [f"{line}\n" for line in head]
    for stack, count in counts.most_common():
        names = ", ".join(name for name, own in threads if own == stack)
        lines.append(f"STACK (count={count}): {names}\n{stack}")
    return "".join(lines)
