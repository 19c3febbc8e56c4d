"""Peers as processes that take turns: see `worker`."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["OURS", "PEERS", "Contender", "chosen", "running"]

_WORKER = Path(__file__).with_name("worker.py")
PEERS = ("eager", "inductor", "lazy", "fit", "torch_xla", "torchax")
OURS = ("lazy", "fit")
_MODULES = {"torch_xla": "torch_xla", "torchax": "torchax"}


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


def chosen(peers: str, pythons: list[str]) -> dict[str, str]:
    """The peers that can run, with the interpreter of each; says of the others why they are left out."""
    interpreters = dict(entry.split("=", 1) for entry in pythons)
    found = {}
    for name in peers.split(","):
        if name not in PEERS:
            raise SystemExit(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
        module = _MODULES.get(name)
        if name in interpreters or module is None or find_spec(module) is not None:
            found[name] = interpreters.get(name, sys.executable)
        else:
            print(f"{name} is left out: {module} is not installed here (--python {name}=/path/to/python names another)")
    return found


@contextlib.contextmanager
def running(peers: dict[str, str], model: str, environment: dict[str, str] | None = None) -> Iterator[list[Contender]]:
    """Start a process for each peer, and end them all."""
    contenders = []
    try:
        for name, python in peers.items():
            process = subprocess.Popen(
                [python, str(_WORKER), name, model],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            contenders.append(Contender(name, process))
        yield contenders
    finally:
        for contender in contenders:
            contender.process.kill()
            contender.process.communicate()
