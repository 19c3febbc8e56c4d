"""The precision of a training: what is computed in which dtype, and the scale of losses in float16.

Weights, optimizer state, losses and metrics are float32 but with "bf16", where the model itself is bfloat16.
"""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.nested import map_tensors

__all__ = ["LossScale", "Precision", "full_precision"]

_SYNONYMS = {
    "fp32": ("fp32", "32", "32-true", "float32", "no"),
    "bf16": ("bf16", "bf16-true", "bfloat16"),
    "bf16-mixed": ("bf16-mixed", "mixed_bfloat16"),
    "fp16-mixed": ("fp16-mixed", "fp16", "16", "16-mixed", "mixed_float16"),
}


class Precision:
    """One of "fp32", "bf16", "bf16-mixed" and "fp16-mixed", by any of the names people know it by.

    Args:
        name: Also "32-true", "bf16-true", "16-mixed" (Lightning), "mixed_bfloat16", "mixed_float16" (Keras), "no",
            "fp16" (Accelerate), 32 or 16.

    Raises:
        ValueError: For another name.

    Attributes:
        name: The first of its names.

    Example:
        >>> Precision("16-mixed").name, Precision(32).name
        ('fp16-mixed', 'fp32')
    """

    def __init__(self, name: str | int) -> None:
        found = next((first for first, names in _SYNONYMS.items() if str(name) in names), None)
        if found is None:
            raise ValueError(
                f"unknown precision {name!r}; the names are {', '.join(_SYNONYMS)} and their synonyms "
                f"{sorted(each for names in _SYNONYMS.values() for each in names if each not in _SYNONYMS)}"
            )
        self.name = found

    def convert(self, model: nn.Module) -> None:
        """Give the model's parameters and buffers their dtype, in place."""
        if self.name == "bf16":
            model.to(torch.bfloat16)

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """A context for the forward pass."""
        if not self.name.endswith("-mixed"):
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.name == "bf16-mixed" else torch.float16
        return torch.autocast(device.type, dtype=dtype)

    def without_autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """A context for what is not the forward pass, within `autocast`."""
        if not self.name.endswith("-mixed"):
            return contextlib.nullcontext()
        return torch.autocast(device.type, enabled=False)

    def of_inputs(self, inputs: Any) -> Any:
        """The model's inputs in the dtype of its parameters."""
        if self.name != "bf16":
            return inputs
        return map_tensors(lambda t: t.to(torch.bfloat16) if t.dtype == torch.float32 else t, inputs)


class LossScale:
    """A factor for losses in float16, so that small gradients do not become 0; all of it on the device.

    As `torch.amp.GradScaler`: an update whose gradients are not finite is not made, and halves the scale; it doubles
    after so many updates that were made. Nothing is read for it: whether an update is made is a part of the program.

    Args:
        device: Where the scale is kept.
        initial, growth_interval: As of `torch.amp.GradScaler`; default 65536 and 2000.
    """

    def __init__(self, device: torch.device, initial: float = 65536.0, growth_interval: int = 2000) -> None:
        self.growth_interval = growth_interval
        self.scale = torch.tensor(initial).to(device)
        self.made = torch.tensor(0, dtype=torch.int32).to(device)
        self._finite: Tensor | None = None

    @classmethod
    def of(cls, precision: Precision, optimizers: Mapping[str, Optimizer], device: torch.device) -> "LossScale | None":
        """The scale for a precision, None if it needs none. The optimizers then count their updates on the device."""
        if precision.name != "fp16-mixed":
            return None
        for optimizer in optimizers.values():
            _keep_steps_on_device(optimizer)
        return cls(device)

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        inverse = self.scale.reciprocal()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse)

    @torch.no_grad()
    def step(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> Tensor:
        """An update, of which nothing is left if a gradient is not finite; returns whether it was made, shape ()."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all()
        before = [(tensor, tensor.detach().clone()) for tensor in _changed_by(optimizer)]
        optimizer.step()
        for tensor, old in before:
            tensor.copy_(torch.where(finite, tensor, old))
        self._finite = finite if self._finite is None else self._finite & finite
        return finite

    @torch.no_grad()
    def end_step(self) -> None:
        """All updates of a step are made: change the scale."""
        if self._finite is None:
            return
        finite, self._finite = self._finite, None
        made = torch.where(finite, self.made + 1, 0)
        grows = made >= self.growth_interval
        factor = torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.scale.mul_(factor)
        self.made.copy_(torch.where(grows, 0, made))

    def state_dict(self) -> dict[str, Any]:
        """The scale, and how many updates were made since it changed."""
        return {"scale": self.scale, "made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`'s result, on any device."""
        self.scale = state["scale"].to(self.scale.device, copy=True)
        self.made = state["made"].to(self.made.device, copy=True)


def _keep_steps_on_device(optimizer: Optimizer) -> None:
    """Let the optimizer count its updates on the device, where one that is not made can be left out.

    What has no `capturable` counts on, which matters only if its update depends on the count (Adagrad's `lr_decay`).
    """
    for group in optimizer.param_groups:
        on_host = all(parameter.device.type == "cpu" for parameter in group["params"])  # where the state is anyway
        if "capturable" not in group or group.get("fused") or on_host:
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device)


def full_precision(tree: Any) -> Any:
    """What a model returns with its bfloat16 and float16 tensors as float32; other objects are left alone."""
    if isinstance(tree, Tensor):
        return tree.float() if tree.dtype in (torch.bfloat16, torch.float16) else tree
    return map_tensors(full_precision, tree) if type(tree) in (dict, list, tuple) else tree


def _changed_by(optimizer: Optimizer) -> list[Tensor]:
    """All that an update changes: the parameters that have a gradient, and their state on the device."""
    changed: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state.get(parameter, {})
            changed.append(parameter)
            changed += [v for v in state.values() if isinstance(v, Tensor) and v.device == parameter.device]
    return changed
