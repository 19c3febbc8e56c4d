"""`Interruption`: Ctrl-C and SIGTERM as a wish to stop, which the loop grants when a step is done.

Owns the signal handlers while `fit` runs. Knows nothing of checkpoints.
"""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from xlatrainer.strategies.strategy import Strategy

__all__ = ["EXIT_CODE", "Interruption"]

EVERY = 16
EXIT_CODE = 128 + signal.SIGTERM  # 143, what a shell reports of a process that SIGTERM has ended


class Interruption:
    """A context in which the first Ctrl-C and SIGTERM ask the training to stop instead of ending it at once.

    A second Ctrl-C raises `KeyboardInterrupt`. Handlers are installed in the main thread only, only over Python's own
    (another's handler stays), and put back at the end.

    Processes that train together must stop after the same step. They compare their wishes every `EVERY` steps, since
    that makes them wait for each other, and at the end of an epoch.

    Args:
        strategy: Compares wishes.

    Attributes:
        signal: SIGINT or SIGTERM if one came, otherwise None.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.signal: signal.Signals | None = None
        self._strategy = strategy
        self._granted: signal.Signals | None = None
        self._steps = 0
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    @property
    def asked(self) -> bool:
        """Whether the training is to stop, which all processes know."""
        return self._wish is not None

    @property
    def is_preemption(self) -> bool:
        """Whether the process is to end, too."""
        return self._wish == signal.SIGTERM

    @property
    def _wish(self) -> signal.Signals | None:
        return self.signal if self._strategy.process[1] == 1 else self._granted

    def settle(self, stop_training: bool, *, now: bool = False) -> bool:
        """Whether to stop, of all processes; called by each after the same steps.

        Args:
            stop_training: What the Trainer of this process says.
            now: Compare the wishes in any case.
        """
        if self._strategy.process[1] == 1:
            return stop_training or self.asked
        self._steps += 1
        if self._steps % EVERY and not now:
            return False
        wish = self._strategy.strongest(int(self.signal or 0) or int(stop_training))
        self._granted = signal.Signals(wish) if wish > 1 else None  # 1 is a Trainer's, and no signal that is caught
        return wish > 0

    def __enter__(self) -> Self:
        self.signal = None
        if threading.current_thread() is threading.main_thread():
            for number, own in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                if signal.getsignal(number) is own:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked DataLoader worker
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return  # Ctrl-C reaches the whole group; the worker serves until the parent has stopped
        if number == signal.SIGTERM:
            self.signal = signal.SIGTERM
            return
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.SIGINT
        with contextlib.suppress(RuntimeError):  # the signal came while stderr was being written to
            print("\nStopping after this step. Press Ctrl-C again to stop at once.", file=sys.stderr, flush=True)
