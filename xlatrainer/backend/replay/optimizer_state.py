"""The optimizer's state before the first step, so that the first step is the same program as every other.

torch's optimizers make their state inside the first `step`. On a lazy device that step is then a program of its own,
compiled for minutes to run once. What the first step would begin with is found by asking the optimizer itself, with one
small parameter on the CPU, and taken only if it comes to the same update as a step that makes its own state.

May import: transfer, tensor, _private_api.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.backend._private_api import bare_optimizer, bare_step
from xlatrainer.backend.tensor import storage_data
from xlatrainer.backend.transfer import uploaded

__all__ = ["initialize_state", "initialize_state_of_step"]

_ON_PARAMETER = object()  # stands for zeros like the parameter


def initialize_state_of_step(optimizer: Optimizer) -> None:
    """`initialize_state` for the parameters that a step about to be made updates, if they are whole on the device.

    The state of what is sharded is left to the step, in which it is sharded like the gradient.
    """
    updated = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if _has_gradient(parameter)
    ]
    if updated and all(_is_whole_on_device(parameter) for parameter in updated):
        # A step that is observed does not see the copies: they are its to write over, as what later steps find there.
        initialize_state(optimizer, lambda parameter, zeros: uploaded(zeros), _has_gradient)


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None


def _is_whole_on_device(parameter: Tensor) -> bool:
    if parameter.device.type != "xla":
        return False
    value = storage_data(parameter).value
    return value is not None and value.sharding is None


def _requires_gradient(parameter: Tensor) -> bool:
    return parameter.requires_grad


def initialize_state(
    optimizer: Optimizer,
    put_beside: Callable[[Tensor, Tensor], Tensor] | None = None,
    among: Callable[[Tensor], bool] = _requires_gradient,
) -> None:
    """Give each parameter without any state what the optimizer's first step would begin with.

    Leaves an optimizer alone whose state cannot be foreseen so: its first step makes it, as always.

    Args:
        optimizer: Of parameters on their device.
        put_beside: Makes the copy on the device of a CPU tensor that is kept for a parameter; see `Strategy`. Default
            None: a copy on the parameter's device.
        among: Which parameters; default those that require a gradient.
    """
    put = put_beside or (lambda parameter, tensor: tensor.to(parameter.device, copy=True))
    for group in optimizer.param_groups:
        fresh = [p for p in group["params"] if among(p) and not optimizer.state.get(p)]
        if not fresh:
            continue
        initial = _initial_state(optimizer, group, fresh[0].dtype)
        for parameter in fresh if initial else []:
            on_device = bool(group.get("capturable"))
            optimizer.state[parameter] = {
                # Copied from the host: zeros made on a lazy device would be operators of the first step, and of that
                # one alone. Expanded, they take memory on neither side until the first step runs.
                key: put(parameter, torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
                if value is _ON_PARAMETER
                else (value.to(parameter.device) if on_device else value.clone())
                for key, value in initial.items()
            }


def _initial_state(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """State before the first step by key: `_ON_PARAMETER` or a CPU tensor of shape (); empty if it is not known."""
    if group.get("fused") or group.get("differentiable"):
        return {}
    at_rest = _Twin(optimizer, group, torch.zeros(2, 2, dtype=dtype))
    at_rest.step(torch.zeros(2, 2, dtype=dtype))
    initial: dict[str, Any] = {}
    for key, value in at_rest.state.items():
        if not isinstance(value, Tensor):
            return {}
        if value.shape == (2, 2) and not value.any():
            initial[key] = _ON_PARAMETER
        elif value.shape == () and key == "step":
            initial[key] = torch.zeros_like(value)
        else:
            return {}
    # Does a step from there come to the same as one that makes its own state?
    weights = torch.tensor([[0.5, -0.25], [1.5, 0.125]], dtype=dtype)
    grad = torch.tensor([[0.75, -1.5], [0.25, 0.5]], dtype=dtype)
    own, given = _Twin(optimizer, group, weights), _Twin(optimizer, group, weights)
    given.optimizer.state[given.parameter] = {
        key: torch.zeros(2, 2, dtype=dtype) if value is _ON_PARAMETER else value.clone()
        for key, value in initial.items()
    }
    own.step(grad)
    given.step(grad)
    same = torch.equal(own.parameter, given.parameter) and own.state.keys() == given.state.keys()
    return initial if same and all(torch.equal(own.state[key], given.state[key]) for key in own.state) else {}


class _Twin:
    """An optimizer of the same class and settings with one small parameter on the CPU."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], weights: Tensor) -> None:
        self.parameter = nn.Parameter(weights.clone())
        self.optimizer = bare_optimizer(optimizer)
        settings = {key: copy.copy(value) for key, value in group.items() if key != "params"}
        for key, value in settings.items():
            settings[key] = value.detach().cpu() if isinstance(value, Tensor) else value
        if "capturable" in settings:
            settings["capturable"] = False  # which is for devices other than the CPU
        self.optimizer.param_groups = [{**settings, "params": [self.parameter]}]

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.optimizer.state[self.parameter])

    def step(self, grad: Tensor) -> None:
        self.parameter.grad = grad.clone()
        bare_step(self.optimizer)
