"""Gradient checkpointing: a module's activations are computed again in the backward pass instead of being kept.

Not `torch.utils.checkpoint`: it sets random states in the backward pass, which would end the program there, and XLA
sees through a plain repetition and keeps the activations after all. Here random operators give the second time what
they gave the first time, and the second computation depends on the gradient that arrives, so that it cannot be done
before.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xlatrainer.backend._private_api import TorchDispatchMode, tree_flatten, tree_unflatten

__all__ = ["recompute_in_backward"]


def recompute_in_backward(model: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    """Let the modules of these classes in `model` compute their activations again in the backward pass.

    Values and gradients stay the same, dropout too. What a module returns must depend on its arguments and parameters
    alone. A buffer that it changes (the statistics of a batch norm) is changed once.

    Args:
        model: Changed in place: these modules get another `forward`.
        classes: The classes; subclasses of them count too.

    Raises:
        TypeError: If one of them is no class of modules.
        ValueError: If the model has no module of a class.
    """
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"gradient_checkpointing must be a list of module classes, got {cls!r}")
        if not any(isinstance(module, cls) for module in model.modules()):
            found = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(f"gradient_checkpointing: the model has no {cls.__name__}; it has {', '.join(found)}")
    for module in model.modules():
        if isinstance(module, tuple(classes)):
            module.forward = _Forward(module)


class _Forward:
    """A module's `forward` whose activations are computed again; an object, so that a copied model has its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.original = module.forward
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.module, self.original, *args, **kwargs)


def _call(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters and not any(leaves[index].requires_grad for index in places):
        return forward(*args, **kwargs)
    call = _Call(module, forward, leaves, structure, places)
    outputs = _Recomputed.apply(call, *(leaves[index] for index in places), *parameters)
    results = list(call.results)
    for index, output in zip(call.outputs, outputs, strict=True):
        results[index] = output
    return tree_unflatten(results, call.result_structure)


class _Call:
    """A call of a module, to be made twice.

    Attributes:
        results, outputs: The leaves of what it returned, tensors left out, and where the tensors belong.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], leaves: list[Any], structure: Any, places: list[int]
    ) -> None:
        self.module = module
        self._forward = forward
        self._leaves = [None if index in places else leaf for index, leaf in enumerate(leaves)]
        self._structure = structure
        self._places = places
        self.number_of_inputs = len(places)
        self._device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        self._autocast = (torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device))
        self._draws: list[Any] = []
        self.results: list[Any] = []
        self.outputs: list[int] = []
        self.result_structure: Any = None

    def first(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The call, as it is made in the forward pass."""
        with _Drawing(self._draws, again=False):
            return self._make(inputs)

    def again(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The same call in the backward pass."""
        enabled, dtype = self._autocast
        with torch.autocast(self._device, dtype=dtype, enabled=enabled), _Drawing(list(self._draws), again=True):
            return self._make(inputs)

    def _make(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        results, self.result_structure = tree_flatten(self._forward(*args, **kwargs))
        self.outputs = [index for index, result in enumerate(results) if isinstance(result, Tensor)]
        self.results = [None if isinstance(result, Tensor) else result for result in results]
        return [results[index] for index in self.outputs]


class _Recomputed(torch.autograd.Function):
    """The tensors that a call returns, as a function of those that it is given and of the module's parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors[: call.number_of_inputs])
        ctx.parameters = tensors[call.number_of_inputs :]
        return tuple(call.first(tensors[: call.number_of_inputs]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call: _Call = ctx.call
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        arrived = next(gradient for gradient in gradients if gradient is not None)
        with torch.enable_grad(), _kept(call.module):
            outputs = call.again([_after(tensor, arrived) for tensor in inputs])
            wanted = [tensor for tensor in [*inputs, *ctx.parameters] if tensor.requires_grad]
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            found = torch.autograd.grad(
                [output for output, _ in pairs], wanted, [gradient for _, gradient in pairs], allow_unused=True
            )
        by_tensor = {id(tensor): gradient for tensor, gradient in zip(wanted, found, strict=True)}
        return None, *(by_tensor.get(id(tensor)) for tensor in [*inputs, *ctx.parameters])


def _after(tensor: Tensor, gradient: Tensor) -> Tensor:
    """`tensor` times 1, where the 1 cannot be known before `gradient` is: XLA must compute what follows, and then only.

    The numbers are inputs of the program, so that XLA does not know what they come to.
    """
    if not tensor.is_floating_point() or gradient.numel() == 0:
        return tensor
    first = gradient.detach()[(0,) * gradient.dim()]
    return tensor * ((first > 0).to(tensor.dtype) * 0.0 + 1.0)


@contextlib.contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """The module's buffers are afterwards what they were before."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, content in before:
                buffer.copy_(content)


class _Drawing(TorchDispatchMode):
    """Notes what random operators give, or gives it again.

    Args:
        draws: What was noted; taken from in order.
        again: Whether to give it.
    """

    def __init__(self, draws: list[Any], again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._again = again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return self._dropout(func, *args, **kwargs)
        if not self._again:
            drawn = func(*args, **kwargs)
            # In place, the tensor itself is given back, and may be written to later: what was drawn is kept.
            self._draws.append(drawn.clone() if _writes(func) else drawn)
            return drawn
        drawn = self._draws.pop(0)
        return args[0].copy_(drawn) if _writes(func) else drawn

    def _dropout(self, func: Any, input: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
        """Only the mask is kept, not what it was laid over."""
        if not self._again:
            output, mask = func(input, p, train)
            self._draws.append(mask)
            return output, mask
        mask = self._draws.pop(0)
        scale = 0.0 if p >= 1 else 1 / (1 - p)
        return (input * mask * scale if train is None or train else input), mask


def _writes(func: Any) -> bool:
    return bool(func._schema.name.endswith("_"))
