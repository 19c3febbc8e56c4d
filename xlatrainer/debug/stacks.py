"""`enable_stack_dumps`: a signal that makes a process say where its threads stand."""

import faulthandler
import signal
import sys

__all__ = ["enable_stack_dumps"]


def enable_stack_dumps() -> None:
    """Let `python -m xlatrainer dump-stacks PID` ask this process for the stacks of its threads.

    From then on the process writes them to stderr when it gets the signal SIGUSR1.
    """
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
