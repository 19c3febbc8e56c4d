"""Optimizers: by name, class or function, and the re-binding of one that was built on the CPU model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.nested import map_tensors

__all__ = [
    "OPTIMIZERS",
    "OptimizerSpec",
    "parameter_names",
    "rebind_optimizer",
    "resolve_optimizer",
    "resolve_optimizers",
]

OptimizerSpec = str | Optimizer | Callable[..., Optimizer]

# LBFGS calls the model several times a step, and SparseAdam takes sparse gradients only: neither fits the loop.
OPTIMIZERS: dict[str, type[Optimizer]] = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and name not in ("Optimizer", "LBFGS", "SparseAdam")
}


def resolve_optimizer(
    spec: OptimizerSpec, parameters: Iterable[nn.Parameter], learning_rate: float | None = None
) -> Optimizer:
    """A new optimizer of `parameters`.

    Args:
        spec: A name of `OPTIMIZERS` in any case, a class of `torch.optim`, or anything that takes parameters and
            returns an optimizer. Not an instance: see `rebind_optimizer`.
        parameters: What it trains.
        learning_rate: Passed on as `lr`; default None, which means the optimizer's default.

    Raises:
        ValueError: For an unknown name, and for LBFGS.
        TypeError: If `spec` is something else, or does not return an optimizer.
    """
    make: Callable[..., Any]
    if isinstance(spec, str):
        if spec.lower() not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {spec!r}; the names are {sorted(OPTIMIZERS)}")
        make = OPTIMIZERS[spec.lower()]
    elif callable(spec):
        make = spec
    else:
        raise TypeError(f"{_ACCEPTED}; got {spec!r}")
    settings: dict[str, Any] = {} if learning_rate is None else {"lr": learning_rate}
    optimizer = make(list(parameters), **settings)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{_ACCEPTED}; {make!r} returned {optimizer!r}")
    return _refuse_closures(optimizer)


def resolve_optimizers(
    spec: OptimizerSpec | Mapping[str, Optimizer],
    names: dict[int, str],
    model: nn.Module,
    learning_rate: float | None = None,
) -> dict[str, Optimizer]:
    """The optimizers of a Trainer by name: "optimizer", or the names of the dict that was given.

    Args:
        spec: What `resolve_optimizer` takes, an optimizer built before the model moved, or a dict of such.
        names: `parameter_names` of the model before it moved.
        model: The model, where it is now.
        learning_rate: For an optimizer that is yet to be made.

    Raises:
        ValueError: If a learning rate is given for optimizers that have their own.
        TypeError: If a dict is empty, or holds anything but optimizers.
    """
    if isinstance(spec, Optimizer | Mapping) and learning_rate is not None:
        raise ValueError("learning_rate is for an optimizer given by name, class or function; this one has its own")
    if isinstance(spec, Mapping):
        wrong = [name for name, value in spec.items() if not isinstance(value, Optimizer)]
        if wrong or not spec:
            raise TypeError(
                f"a dict of optimizers must hold optimizers of the model's parameters by name; got "
                f"{spec[wrong[0]]!r} as {wrong[0]!r}"
                if wrong
                else "the dict of optimizers is empty"
            )
        return {name: rebind_optimizer(optimizer, names, model) for name, optimizer in spec.items()}
    if isinstance(spec, Optimizer):
        return {"optimizer": rebind_optimizer(spec, names, model)}
    return {"optimizer": resolve_optimizer(spec, model.parameters(), learning_rate)}


def parameter_names(model: nn.Module) -> dict[int, str]:
    """A name for each Parameter of `model`, by its id: what `rebind_optimizer` needs from before the move."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def rebind_optimizer(optimizer: Optimizer, names: dict[int, str], model: nn.Module) -> Optimizer:
    """Let `optimizer`, built before the model moved, train the moved model; param groups and state are kept.

    Changed in place, so that a learning rate scheduler that holds it goes on working.

    Args:
        optimizer: Built on the model before it moved.
        names: `parameter_names` of the model before it moved.
        model: The model, where it is now.

    Raises:
        ValueError: If the optimizer holds parameters that the model does not have, and for LBFGS.
    """
    _refuse_closures(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [parameter for parameter in held if id(parameter) not in names]
    if strangers:
        raise ValueError(
            f"the optimizer holds {len(held)} parameters, {len(strangers)} of which are not parameters of the model "
            f"(the first has shape {tuple(strangers[0].shape)}). Build it on this model: optimizer(model.parameters())"
        )
    moved = {parameter: model.get_parameter(names[id(parameter)]) for parameter in held}
    state = {moved[old]: optimizer.state[old] for old in held if old in optimizer.state}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = [moved[old] for old in group["params"]]
        for parameter in group["params"]:
            if parameter in state:
                optimizer.state[parameter] = _move_state(state[parameter], group, parameter.device)
    return optimizer


def _move_state(state: dict[str, Any], group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    # PyTorch keeps the step count on the CPU, where it can be read for free, unless the optimizer runs fused.
    step_stays = not (group.get("capturable") or group.get("fused"))

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    return {key: value if key == "step" and step_stays else map_tensors(move, value) for key, value in state.items()}


def _refuse_closures(optimizer: Optimizer) -> Optimizer:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the model several times a step, which fit does not do; use another optimizer")
    return optimizer


_ACCEPTED = (
    f"optimizer must be one of {sorted(OPTIMIZERS)}, a class of torch.optim, a function of the parameters that returns "
    f"an optimizer, or an optimizer of the model's parameters"
)
