"""`compile`: a function whose every call is one program, replayed without its Python once it is stable.

May import: replay, closures.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import nn

from xlatrainer.backend.closures import run_waiting
from xlatrainer.backend.replay.step import ReplayedStep

__all__ = ["compile"]

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def compile(fn_or_module: _F, *, name: str | None = None) -> _F: ...
@overload
def compile(fn_or_module: None = None, *, name: str | None = None) -> Callable[[_F], _F]: ...


def compile(fn_or_module: Any = None, *, name: str | None = None) -> Any:
    """Make each call of a function one program, and stop running its Python once that makes no difference.

    Works on a training step (forward, backward and `optimizer.step()`) as well as on a forward pass. What is pending
    runs before a call, what the call recorded runs at its end. After two calls in a row that did the same, further ones
    with arguments of the same kind start the program directly: contents of tensors, learning rates and step counts of
    optimizers and random numbers are its inputs. Changed modes, settings, shapes or `requires_grad` are noticed, and a
    function that reads values, draws from Python's `random` or changes Python state runs its Python every time; the
    attribute `step.reason` says why. Results do not require gradients if the function made an optimizer's update.

    Args:
        fn_or_module: a function or a module, of tensors on the device; None to use `compile` as a decorator with
            arguments.
        name: for messages; default None, the function's own.

    Returns:
        A function of the same arguments, with the `ReplayedStep` as its attribute `step`.

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
    if fn_or_module is None:
        return lambda function: compile(function, name=name)
    if not callable(fn_or_module):
        raise TypeError(f"compile takes a function or a module, got {fn_or_module!r}")
    step = ReplayedStep(fn_or_module, name=name or "")

    def compiled(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        run_waiting()
        return result

    if not isinstance(fn_or_module, nn.Module):
        functools.update_wrapper(compiled, fn_or_module)
    compiled.step = step  # type: ignore[attr-defined]
    return compiled
