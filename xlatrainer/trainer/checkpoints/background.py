"""`BackgroundWriter`: one job at a time on a thread of its own, whose error is raised at the next opportunity."""

import atexit
import logging
import threading
from collections.abc import Callable

__all__ = ["BackgroundWriter"]

_log = logging.getLogger("xlatrainer.checkpoints")
_unraised: dict[int, BaseException] = {}  # errors that no caller was told of, by the id of their writer


class BackgroundWriter:
    """Runs jobs one after the other while the caller goes on.

    The thread is no daemon: a process that ends waits for it, and an error that nobody was told of by then is logged.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the job before, raise its error if it had one, and start this one."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="xlatrainer-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job that runs, if any, and raise its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error = _unraised.pop(id(self), None)
        if error is not None:
            error.add_note("raised by the thread that writes checkpoints in the background")
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            _unraised[id(self)] = error


@atexit.register
def _report() -> None:
    """At the end of the process, when its threads have ended."""
    for error in _unraised.values():
        _log.error("a checkpoint was not written: %s", error)
