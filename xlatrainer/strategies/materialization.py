"""Parameters get to the devices: one after the other, each device its part, and made first where they are still "meta".

A model that was made under `torch.device("meta")` has shapes and no contents. Each of its modules is initialized on the
host by its own `reset_parameters`, and sent away before the next one: neither the host nor a device ever holds all of
the model.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["materialize", "replace_parameter"]

Place = Callable[[str, Tensor], Tensor]


def replace_parameter(model: nn.Module, name: str, contents: Tensor) -> None:
    """Give a parameter other contents, on another device perhaps; the Parameter stays the same object if it can.

    It cannot if something has a weak reference to it, or a graph waits for its backward pass: it is a new one then.
    """
    parameter = model.get_parameter(name)
    made = nn.Parameter(contents, requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        made.grad = parameter.grad.to(contents.device)
    try:
        torch.utils.swap_tensors(parameter, made)
    except RuntimeError:
        for owner in model.modules():
            for key, other in owner._parameters.items():
                if other is parameter:
                    owner._parameters[key] = made


def materialize(model: nn.Module, place: Place) -> None:
    """Initialize the modules whose parameters or buffers are on the meta device, and place their parameters.

    Args:
        model: Changed in place; nothing happens to modules with contents.
        place: A parameter's name and contents on the CPU to the tensor on the devices.

    Raises:
        ValueError: For a module that cannot initialize itself.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    done: set[int] = set()
    for path, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        missing = [key for key, tensor in own if tensor.is_meta]
        if not missing:
            continue
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ValueError(
                f"{path or 'the model'} ({type(module).__name__}) has {', '.join(missing)} on the meta device and no "
                f"method reset_parameters() to initialize them: give the class one, or make the model on the CPU"
            )
        before = dict(module.named_parameters(recurse=False))
        _allocate(module, missing)
        reset()
        forgotten = [key for key in missing if _is_unwritten(getattr(module, key))]
        if forgotten:
            raise ValueError(
                f"{path or 'the model'} ({type(module).__name__}): reset_parameters() leaves {', '.join(forgotten)} "
                f"without contents, which is on the meta device: initialize it there too, or make the model on the CPU"
            )
        for key, parameter in before.items():
            fresh = module._parameters[key]
            assert fresh is not None
            module._parameters[key] = parameter
            if id(parameter) not in done and fresh is not parameter:
                name = names[id(parameter)]
                placed = nn.Parameter(place(name, fresh.detach()), requires_grad=parameter.requires_grad)
                torch.utils.swap_tensors(parameter, placed)
            done.add(id(parameter))


def _mark_of(tensor: Tensor) -> float | int:
    """What stands for contents that nobody has written."""
    return float("nan") if tensor.is_floating_point() or tensor.is_complex() else torch.iinfo(tensor.dtype).min


def _allocate(module: nn.Module, keys: list[str]) -> None:
    """Give these parameters and buffers of the module memory on the CPU."""
    for key in keys:
        tensor = getattr(module, key)
        made = torch.empty_like(tensor, device="cpu")
        if tensor.dtype != torch.bool:
            made = made.detach().fill_(_mark_of(tensor))
        if isinstance(tensor, nn.Parameter):
            module._parameters[key] = nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            module._buffers[key] = made


def _is_unwritten(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    mark = _mark_of(tensor)
    return bool((tensor.isnan() if mark != mark else tensor == mark).all())
