"""Peers as processes that take turns: see `worker`."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import BENCHMARKS

__all__ = ["CACHES", "PEERS", "Contender", "add_arguments", "chosen", "interpreters", "running"]

_WORKER = Path(__file__).with_name("worker.py")
# Peers, and the package that each needs.
PEERS = {
    "eager": "torch",
    "inductor": "torch",
    "lazy": "xlatrainer",
    "fit": "xlatrainer",
    "jax": "jax",
    "torch_xla": "torch_xla",
    "torchax": "torchax",
}
# The variables that name a peer's folder of compiled programs; the others keep none. (torch_xla 2.9 writes them on a
# CPU, but its client there cannot read them back.)
CACHES = {
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
    "lazy": "XLATRAINER_CACHE_DIR",
    "fit": "XLATRAINER_CACHE_DIR",
    "jax": "JAX_COMPILATION_CACHE_DIR",
    "torchax": "JAX_COMPILATION_CACHE_DIR",
}


@dataclass
class Contender:
    """A peer that is ready for its first step."""

    name: str
    process: "subprocess.Popen[str]"
    answers: list[dict[str, Any]] = field(default_factory=list)

    def steps(self, number: int) -> dict[str, Any]:
        """Make some steps; the answer is also kept in `answers`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{number}\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}; its message is above")
        answer: dict[str, Any] = json.loads(line)
        self.answers.append(answer)
        return answer


def add_arguments(parser: argparse.ArgumentParser, peers: str) -> None:
    """The options that say who takes part: `--peers`, `--models` and `--python`."""
    parser.add_argument("--peers", default=peers, help=f"of {', '.join(PEERS)}; default {peers}")
    parser.add_argument("--models", default=",".join(BENCHMARKS), help=f"of {', '.join(BENCHMARKS)}; default all")
    add_python_argument(parser)


def add_python_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="the interpreter that has a peer installed which this one has not; may be given for several",
    )


def interpreters(entries: list[str]) -> dict[str, str]:
    """The interpreters that `--python` names, by peer."""
    named = {}
    for entry in entries:
        name, separator, path = entry.partition("=")
        if name not in PEERS or not separator:
            raise SystemExit(f"--python {entry}: it takes PEER=PATH, where PEER is of {', '.join(PEERS)}")
        named[name] = path
    return named


def _has(python: str, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:  # from the folder that a worker finds our own package in
        return subprocess.run([python, "-c", code], cwd=_WORKER.parent.parent, check=False).returncode == 0
    except OSError as error:
        raise SystemExit(f"{python} does not run: {error}") from error


def chosen(peers: str, entries: list[str]) -> dict[str, str]:
    """The peers that can run, with the interpreter of each; says of the others why they are left out."""
    named = interpreters(entries)
    found = {}
    for name in peers.split(","):
        if name not in PEERS:
            raise SystemExit(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
        python = named.get(name, sys.executable)
        if _has(python, PEERS[name]):
            found[name] = python
        else:
            hint = f"--python {name}=/path/to/python names an interpreter that has it"
            print(f"{name} is left out: {python} has no {PEERS[name]} ({hint})", flush=True)
    return found


@contextlib.contextmanager
def running(
    peers: Mapping[str, str], model: str, environment: Mapping[str, str] | None = None
) -> Iterator[list[Contender]]:
    """Start a process for each peer, and end them all."""
    contenders = []
    try:
        for name, python in peers.items():
            process = subprocess.Popen(
                [python, str(_WORKER), name, model],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **(environment or {})},
            )
            contenders.append(Contender(name, process))
        yield contenders
    finally:
        for contender in contenders:
            contender.process.kill()
            contender.process.communicate()
