"""`compile`: a function whose every call is one program, replayed without its Python once it is stable; or a block.

May import: replay, closures, executor, state.
"""

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, overload

from torch import nn

from xlatrainer.backend.closures import step_ended
from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.replay.graphs import GraphLimit
from xlatrainer.backend.replay.observation import STEP_BEGINS, STEP_ENDS, whole_graph
from xlatrainer.backend.replay.step import ReplayedStep
from xlatrainer.backend.state import state

__all__ = ["Region", "compile", "step"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Region:
    """What `compile` gives without a function: a decorator, and a context manager whose block is one program."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._graphs = GraphLimit(options["name"] or "the block", options["num_different_graphs_allowed"])
        self._context: contextlib.ExitStack | None = None

    def __call__(self, function: _F) -> _F:
        return compile(function, **self._options)

    def __enter__(self) -> None:
        if self._context is not None:
            raise RuntimeError("this block is entered already; give each of nested blocks its own compile()")
        run_pending(STEP_BEGINS)
        with contextlib.ExitStack() as context:
            context.enter_context(state.lazy_region())
            if self._options["full_graph"]:
                context.enter_context(whole_graph())
            self._context = context.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._context is not None
        context, self._context = self._context, None
        context.close()
        graph = state.trace.node
        run_pending(STEP_ENDS)
        if kind is None:
            step_ended()
            self._graphs.note(graph)


@overload
def compile(
    fn_or_module: _F,
    *,
    full_graph: bool = False,
    name: str | None = None,
    num_different_graphs_allowed: int | None = None,
) -> _F: ...
@overload
def compile(
    fn_or_module: None = None,
    *,
    full_graph: bool = False,
    name: str | None = None,
    num_different_graphs_allowed: int | None = None,
) -> Region: ...


def compile(
    fn_or_module: Any = None,
    *,
    full_graph: bool = False,
    name: str | None = None,
    num_different_graphs_allowed: int | None = None,
) -> Any:
    """Make each call of a function one program, and stop running its Python once that makes no difference.

    Works on a training step (forward, backward and `optimizer.step()`) as well as on a forward pass. What is pending
    runs before a call, what the call recorded runs at its end, in eager mode too. After two calls in a row that did the
    same, further ones with arguments of the same kind start the program directly: contents of tensors, learning rates
    and step counts of optimizers and random numbers are its inputs. Changed modes, settings, shapes or `requires_grad`
    are noticed, and so is what the function reads on the host of a CPU tensor that it is given. A function that reads
    values of the device, draws from Python's `random`, changes Python state or is given other objects than tensors,
    numbers, strings and their like runs its Python every time; the attribute `step.reason` says why. An optimizer's
    state is made before its first update, so that the first call is no program of its own. Results do not require
    gradients if the function made an optimizer's update.

    Args:
        fn_or_module: a function or a module, of tensors on the device; None to use `compile` as a decorator with
            arguments, or as a context manager: `with xla.compile(): ...` makes one program of the block.
        full_graph: raise a `GraphBreakError` at the line that would end the graph early (one that reads a value).
            Default False: what comes after it is a further program.
        name: for messages; default None, the function's own.
        num_different_graphs_allowed: raise a `GraphLimitError`, which says what changed, when a call has come to one
            graph more than that; the call has been made. Default None: any number.

    Returns:
        A function of the same arguments, with the `ReplayedStep` as its attribute `step`.

    Raises:
        TypeError: for something that cannot be called.
        ValueError: for a limit below 1.

    Example:
        >>> import torch, xlatrainer as xla
        >>> weight = torch.ones(3, device="xla", requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> @xla.compile
        ... def train_step(x):
        ...     optimizer.zero_grad()
        ...     loss = (weight * x).square().sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> losses = [train_step(torch.ones(3, device="xla")).item() for _ in range(4)]
        >>> [round(loss, 4) for loss in losses]
        [3.0, 1.92, 1.2288, 0.7864]
        >>> train_step.step.reason
        ''
    """
    if num_different_graphs_allowed is not None and num_different_graphs_allowed < 1:
        raise ValueError(f"num_different_graphs_allowed must be at least 1, got {num_different_graphs_allowed}")
    options = {
        "full_graph": full_graph,
        "name": name,
        "num_different_graphs_allowed": num_different_graphs_allowed,
    }
    if fn_or_module is None:
        return Region(options)
    if not callable(fn_or_module):
        raise TypeError(f"compile takes a function or a module, got {fn_or_module!r}")
    replayed = ReplayedStep(
        fn_or_module, name=name or "", full_graph=full_graph, graphs_allowed=num_different_graphs_allowed
    )

    def compiled(*args: Any, **kwargs: Any) -> Any:
        result = replayed(*args, **kwargs)
        step_ended()
        return result

    if not isinstance(fn_or_module, nn.Module):
        functools.update_wrapper(compiled, fn_or_module)
    compiled.step = replayed  # type: ignore[attr-defined]
    return compiled


def step() -> Region:
    """A context manager whose block is a step: one program, started at its end.

    Example:
        >>> import torch, xlatrainer as xla
        >>> total = torch.zeros(2, device="xla")
        >>> with xla.step():
        ...     total += 1
        >>> total
        tensor([1., 1.], device='xla:0')
    """
    return compile()
