"""`launch`: run a function in several processes that form one computation, or in this one. May import `backend`."""

import multiprocessing
import multiprocessing.connection
import pickle
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from xlatrainer import config
from xlatrainer.backend import processes
from xlatrainer.distributed.processes import process_index
from xlatrainer.errors import ProcessesError

__all__ = ["launch"]

_METHODS = ("spawn", "forkserver")
_GRACE = 10.0  # seconds that processes have to end on their own once one of them has failed


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
    *,
    nprocs: int | None = None,
) -> None:
    """Call `fn(index, *args)` in each of several processes, whose devices are one mesh, and wait for their end.

    One process drives all devices of a machine, so `fn` runs in this process unless `nprocs` says otherwise. Under
    `torchrun`, which has started the processes, it runs in this one with its rank as index.

    Args:
        fn: A function of a module, for processes that are started here.
        args: What it is called with after the index.
        start_method: "spawn" (default) or "forkserver".
        debug_single_process: Run in this process alone, whatever `nprocs` says. Default False.
        nprocs: How many processes to start on this machine. On the CPU each makes `CPU_NUM_DEVICES` devices. Default
            None: none.

    Raises:
        ProcessesError: If one of them fails; the others are ended. It says which, and why.
        ValueError: For another start method, or fewer processes than one.
    """
    if start_method not in _METHODS:
        raise ValueError(
            f"start_method={start_method!r}: accepted are {_METHODS}; a forked process cannot use a device"
        )
    if nprocs is not None and nprocs < 1:
        raise ValueError(f"nprocs must be at least 1, got {nprocs}")
    if processes.is_launched():
        fn(process_index(), *args)
    elif debug_single_process or nprocs in (None, 1):
        fn(0, *args)
    else:
        assert nprocs is not None
        _start(fn, tuple(args), start_method, nprocs)


def _start(fn: Callable[..., Any], args: tuple[Any, ...], start_method: str, number: int) -> None:
    context: Any = multiprocessing.get_context(start_method)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started: list[Any] = []
    pipes = []
    try:
        for index in range(number):
            receive, send = context.Pipe(duplex=False)
            child = context.Process(
                target=_run, args=(fn, args, index, number, port, send), name=f"xlatrainer-{index}", daemon=False
            )
            child.start()
            send.close()
            started.append(child)
            pipes.append(receive)
        _watch(started, pipes)
    finally:
        for child in started:
            if child.is_alive():
                child.terminate()
        for child in started:
            child.join(_GRACE)
            if child.is_alive():
                child.kill()
                child.join()
        for pipe in pipes:
            pipe.close()


def _run(fn: Callable[..., Any], args: tuple[Any, ...], index: int, number: int, port: int, report: Any) -> None:
    """What a started process does."""
    config.put(rank=index, world_size=number, local_rank=index, master_addr="127.0.0.1", master_port=port)
    try:
        fn(index, *args)
        processes.leave()
    except BaseException as error:
        report.send((type(error).__name__, "".join(traceback.format_exception(error))))
        raise
    finally:
        report.close()


def _watch(started: Sequence[Any], pipes: Sequence[Any]) -> None:
    """Wait for all; raise for the first that fails.

    One that says so has failed, whether it has ended or not: JAX lets it wait for the others first.
    """
    waiting = {
        waited: index for each in ([child.sentinel for child in started], pipes) for index, waited in enumerate(each)
    }
    while waiting:
        for ready in multiprocessing.connection.wait(list(waiting)):
            index = waiting.pop(ready)
            child, said = started[index], _said(pipes[index])
            if ready == child.sentinel:
                child.join()
            if said or child.exitcode:
                raise ProcessesError(_reason(index, len(started), child.exitcode, said))


def _said(pipe: Any) -> str:
    """How a process says that it failed; empty if it has not said anything."""
    try:
        kind, trace = pipe.recv() if pipe.poll() else ("", "")
    except (EOFError, pickle.UnpicklingError):
        return ""
    return f"with {kind}. Its traceback:\n{trace}" if kind else ""


def _reason(index: int, number: int, code: int | None, said: str) -> str:
    if not said and code is not None and code < 0:
        said = f"by {signal.Signals(-code).name}: it was killed, by the system for want of memory perhaps, or crashed"
    return f"process {index} of {number} ended {said or f'with exit code {code}'}"
