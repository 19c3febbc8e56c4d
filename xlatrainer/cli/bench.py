"""Run a benchmark of the sources' `benchmarks` folder: `python -m xlatrainer bench steps --models mnist`.

Benchmarks are not installed with the package; run this in the sources.
"""

import argparse
import importlib.util
import subprocess
import sys

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of `python -m benchmarks`")


def run(options: argparse.Namespace) -> int:
    """Run it; returns its exit code."""
    if importlib.util.find_spec("benchmarks") is None:
        print("bench: there is no folder `benchmarks` here; run this in the sources of xlatrainer", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, "-m", "benchmarks", *options.arguments], check=False).returncode
