"""Calls for the lowerings that torch's database does not reach: `name -> (function, inputs)`.

Overloads that take nothing but tensors, numbers and lists of them get their arguments from the schema.
"""

from collections.abc import Callable
from typing import Any

import torch

from xlatrainer.backend.lowerings.registry import registered

__all__ = ["BY_SCHEMA", "CALLS", "arguments_by_schema"]

aten = torch.ops.aten


def _uniform(*shape: int, low: float = 0.1, high: float = 0.9, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator) * (high - low) + low


# Names, without `aten::`, of the lowerings that are called with what their schema says.
BY_SCHEMA = sorted(
    name.removeprefix("aten::")
    for name in registered()
    if name.startswith("aten::_foreach_") or name.endswith((".n_scalar", ".x_scalar"))
)


def arguments_by_schema(overload: Any) -> list[Any]:
    """Arguments for what an overload must be given: tensors of numbers between 0 and 1, and plain numbers."""
    made: list[Any] = []
    for position, argument in enumerate(overload._schema.arguments):
        kind = str(argument.type)
        if argument.has_default_value() or argument.kwarg_only:
            continue
        if kind == "Tensor" and overload._schema.name.startswith("aten::_foreach_"):
            made.append(torch.tensor(0.7))
        elif kind == "Tensor":
            made.append(_uniform(4, seed=position) * (1 if argument.name == "x" else 4))
        elif kind == "List[Tensor]":
            made.append([_uniform(*shape, seed=position) for shape in ((3,), (2, 4), ())])
        elif kind == "List[number]":
            made.append([0.5, 2, 1.5])
        elif kind == "number":
            made.append(3 if argument.name == "n" else 0.6)
        else:
            raise TypeError(f"{overload}: nothing to give for {kind}")
    return made


def _graded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The results of a function of float tensors, and the gradients of its inputs."""

    def graded(*inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        results = function(*leaves)
        results = list(results) if isinstance(results, tuple | list) else [results]
        total = sum((r * r).sum() for r in results if r.requires_grad)
        return [*results, *torch.autograd.grad(total, [x for x in leaves if x.requires_grad])]

    return graded


def _kaiser(x: torch.Tensor) -> list[torch.Tensor]:
    window = torch.kaiser_window
    device = {"device": x.device}
    return [window(n, **device) for n in (0, 1, 2, 7)] + [window(6, False, **device), window(9, True, 3.5, **device)]


def _batch_norm_with_update(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mean, var = torch.zeros_like(weight), torch.ones_like(weight)
    return aten._batch_norm_with_update(x, weight, bias, mean.detach(), var.detach(), 0.1, 1e-5)[0] ** 2


def _overrideable(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    if x.device.type == "cpu":  # which has no kernel under this name
        return torch.convolution(x, weight, bias, *options)
    return aten._convolution(x, weight, bias, *options, False, False, False, False)


def _drawn(x: torch.Tensor) -> list[torch.Tensor]:
    """What is sure of random numbers: their bounds, and that a permutation holds every number once."""
    ints = torch.zeros(50, dtype=torch.int64, device=x.device)
    found = [torch.sort(torch.randperm(20, device=x.device))[0]]
    for low, high in ((0, 7), (-3, 5)):
        drawn = ints.clone().random_(low, high)
        found.append((drawn >= low) & (drawn < high))
    found += [ints.clone().random_(9) < 9, ints.clone().random_() >= 0]
    for probability in (0.0, 1.0):
        found += [torch.bernoulli(x, probability), torch.bernoulli(torch.full_like(x, probability))]
        found.append(ints.clone().bernoulli_(torch.full((50,), probability, device=x.device)))
    return [*found, torch.nn.functional.dropout(x, 0.0), aten.native_dropout(x, 0.0, True)[0], x.clone().zero_()]


def _fake_quantized(x: torch.Tensor) -> list[torch.Tensor]:
    scale = torch.full((4,), 0.1, device=x.device)
    zero = torch.zeros(4, dtype=torch.int32, device=x.device)
    enabled = torch.ones(1, dtype=torch.int64, device=x.device)
    return [
        torch.fake_quantize_per_channel_affine(x, scale, zero, 1, -8, 7),
        torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7),
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, scale[:1], zero[:1], enabled, -8, 7)[0],
    ]


def _cell(name: str) -> Callable[..., Any]:
    def call(x: torch.Tensor, state: torch.Tensor, *weights: torch.Tensor) -> Any:
        return getattr(torch, name)(x, (state, state * 2) if name == "lstm_cell" else state, *weights)

    return _graded(call)


def _cell_inputs(gates: int) -> tuple[torch.Tensor, ...]:
    shapes = ((2, 3), (2, 5), (gates * 5, 3), (gates * 5, 5), (gates * 5,), (gates * 5,))
    return tuple(_uniform(*shape, low=-1, high=1) for shape in shapes)


def _shifted(x: torch.Tensor) -> list[torch.Tensor]:
    by = torch.full_like(x, 2)
    results = [x << 2, x >> 1, x << by, x >> by]
    x = x.clone()
    x <<= 1
    return [*results, x]


_IMAGE, _GRID = _uniform(2, 3, 5, 4, low=-1), _uniform(2, 6, 7, 2, low=-1.5, high=1.5)
_INTEGERS = torch.arange(12).reshape(3, 4)

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "_batch_norm_with_update": (_graded(_batch_norm_with_update), (_uniform(4, 3, 5), _uniform(3), _uniform(3))),
    "_grid_sampler_2d_cpu_fallback": (
        lambda x, grid: aten._grid_sampler_2d_cpu_fallback(x, grid, 0, 0, False),
        (_IMAGE, _GRID),
    ),
    "_index_put_impl": (
        lambda x, at: aten._index_put_impl(x, [at], torch.ones_like(x[:2]), True),
        (_uniform(4, 3), torch.tensor([1, 1])),
    ),
    "_int_mm": (torch._int_mm, (_INTEGERS.to(torch.int8), _INTEGERS.mT.to(torch.int8))),
    "_weight_norm": (_graded(torch._weight_norm), (_uniform(4, 3), _uniform(4, 1))),
    "convolution_overrideable": (
        _graded(_overrideable),
        (_uniform(2, 3, 5, 5), _uniform(4, 3, 3, 3), _uniform(4)),
    ),
    "fake_quantize": (_fake_quantized, (_uniform(3, 4, low=-1),)),
    "gru_cell": (_cell("gru_cell"), _cell_inputs(3)),
    "kaiser_window": (_kaiser, (torch.zeros(()),)),
    "lstm_cell": (_cell("lstm_cell"), _cell_inputs(4)),
    "random numbers": (_drawn, (_uniform(5, 6),)),
    "shift operators": (_shifted, (_INTEGERS,)),
}
