"""`Team`: processes that do something together on the host, such as saving a checkpoint, and tell each other about it.

Messages go through the service that joined the processes, not over the devices: a thread may send them while the
devices train. May import processes and `backend`.
"""

import itertools
from typing import Any, Protocol

from xlatrainer.backend._private_api import coordination_client
from xlatrainer.distributed.processes import process_count, process_index

__all__ = ["JoinedProcesses", "Team"]

_PATIENCE = 3600 * 1000  # milliseconds; a process that has died ends the others long before


class Team(Protocol):
    """The processes, and this one among them."""

    @property
    def index(self) -> int:
        """This process's number, from 0."""

    @property
    def count(self) -> int:
        """How many there are."""

    def owns(self, device: Any) -> bool:
        """Whether a JAX device is this process's."""

    def gather(self, text: str) -> list[str]:
        """The texts that all processes give, in their order; waits for them.

        All make the same calls in the same order, each from one thread at a time, whichever it is.
        """


class JoinedProcesses:
    """The `Team` of all processes that form one computation. Each makes its teams in the same order."""

    _made = itertools.count()

    def __init__(self) -> None:
        self._name = f"xlatrainer/team{next(JoinedProcesses._made)}"
        self._calls = 0

    @property
    def index(self) -> int:
        return process_index()

    @property
    def count(self) -> int:
        return process_count()

    def owns(self, device: Any) -> bool:
        return bool(device.process_index == self.index)

    def gather(self, text: str) -> list[str]:
        """See `Team`.

        Raises:
            jax.errors.JaxRuntimeError: If a process gives nothing for an hour, or the service is gone.
        """
        client = coordination_client()
        call, self._calls = self._calls, self._calls + 1
        client.key_value_set(f"{self._name}/{call}/{self.index}", text)
        found = [client.blocking_key_value_get(f"{self._name}/{call}/{i}", _PATIENCE) for i in range(self.count)]
        if call:  # all are here, so that all have read what was given before
            client.key_value_delete(f"{self._name}/{call - 1}/{self.index}")
        return found
