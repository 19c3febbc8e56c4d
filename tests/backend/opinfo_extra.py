"""Calls for the lowerings that torch's database does not reach: `name -> (function, inputs)`.

Overloads that take nothing but tensors, numbers and lists of them get their arguments from the schema.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from xlatrainer.backend.lowerings.registry import registered

__all__ = ["BY_SCHEMA", "CALLS", "arguments_by_schema"]

aten = torch.ops.aten


def _uniform(*shape: int, low: float = 0.1, high: float = 0.9, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator) * (high - low) + low


# Overloads to which no public function leads, most of them since Python's functions take a number as a tensor.
_NUMBER_TAKING = (
    "_aminmax", "clamp_max", "floor_divide.Scalar", "fmod.Scalar", "remainder.Scalar_Tensor",
    "special_xlog1py.other_scalar", "special_xlog1py.self_scalar", "special_zeta.other_scalar",
    "xlogy.Scalar_Other", "xlogy.Scalar_Self",
)  # fmt: skip

# Names, without `aten::`, of the lowerings that are called with what their schema says.
BY_SCHEMA = sorted(
    name.removeprefix("aten::")
    for name in registered()
    if name.startswith("aten::_foreach_")
    or name.endswith((".n_scalar", ".x_scalar"))
    or name.removeprefix("aten::") in _NUMBER_TAKING
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


def _overrideable(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    if x.device.type == "cpu":  # which has no kernel under this name
        out = torch.convolution(x, weight, bias, *options)
        return [out, out.detach()]
    within = aten._convolution(x.detach(), weight.detach(), bias.detach(), *options, False, False, False, False)
    return [aten.convolution_overrideable(x, weight, bias, *options), within]


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


def _with_numbers(name: str, number: int, mirrored: bool = True) -> Callable[..., Any]:
    """An operator of whole numbers and bools, with a number second and first."""
    packet = getattr(aten, name)
    second, first = (packet.Scalar, packet.Scalar_Tensor) if mirrored else (packet.Tensor_Scalar, packet.Scalar_Tensor)

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [result for x in inputs for result in (second(x, number), first(number, x))]

    return call


def _searched(row: torch.Tensor) -> list[torch.Tensor]:
    sorter = torch.argsort(row, descending=True).argsort()
    results = []
    for number in (-1, 2, 2.5, 100):
        for right in (False, True):
            results.append(aten.bucketize.Scalar(number, row, out_int32=right, right=right))
            results.append(aten.searchsorted.Scalar(row, number, right=right))
        results.append(aten.searchsorted.Scalar(row.flip(0), number, side="right", sorter=sorter))
    return results


def _contained(x: torch.Tensor) -> list[torch.Tensor]:
    pairs = ((aten.isin.Scalar_Tensor, (5, x)), (aten.isin.Scalar_Tensor, (50, x)), (aten.isin.Tensor_Scalar, (x, 5)))
    return [function(*given, invert=invert) for function, given in pairs for invert in (False, True)]


def _norms(x: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for p in (None, 0, 1, 2, 3.5, float("inf")):
        results.append(aten.norm.ScalarOpt_dtype(x, p, dtype=torch.float64))
        results += [aten.norm.ScalarOpt_dim_dtype(x, p, [1], keep, dtype=torch.float64) for keep in (False, True)]
    for order in (1, 2, 3.5):
        results += [aten.linalg__powsum(x, order), aten.linalg__powsum(x, order, [0], True, dtype=torch.float64)]
    return results


def _product_in(name: str) -> Callable[..., Any]:
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":  # which has no kernel under this name
            return getattr(torch, name)(x.float(), y.float())
        return getattr(aten, name).dtype(x, y, torch.float32)

    return call


def _glu_tangents(x: torch.Tensor, dx: torch.Tensor, grad: torch.Tensor, dgrad: torch.Tensor) -> list[torch.Tensor]:
    grad_x = aten.glu_backward(grad, x, 1)
    return [aten.glu_jvp(aten.glu(x, 1), x, dx, 1), aten.glu_backward_jvp(grad_x, grad, x, dgrad, dx, 1)]


def _masked_softmax(x: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
    """With the three kinds of mask; only the last has a gradient."""
    y = x.detach()
    return [
        aten._masked_softmax(y, rows, 3, 0),
        aten._masked_softmax(y, keys, 3, 1),
        aten._masked_softmax(x, whole, 2, 2),
    ]


def _sampled(x: torch.Tensor) -> list[torch.Tensor]:
    """Distributions of which every sample is known, and the bounds of others."""
    counts = (x * 9).floor()
    gamma, dirichlet, rates = aten._standard_gamma(x * 3), aten._sample_dirichlet(x), aten.poisson(x * 3)
    successes = aten.binomial(counts, x)
    return [
        aten._standard_gamma(torch.zeros_like(x)),
        aten._sample_dirichlet(x[:, :1]),
        aten.poisson(torch.zeros_like(x)),
        *(aten.binomial(counts, torch.full_like(x, probability)) for probability in (0, 1)),
        aten.normal.float_Tensor(1.5, torch.zeros_like(x)),
        *(gamma > 0, dirichlet.sum(-1), (rates >= 0) & (rates == rates.floor())),
        (successes >= 0) & (successes <= counts) & (successes == successes.floor()),
    ]


def _learnable(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> list[torch.Tensor]:
    return [
        aten._fake_quantize_learnable_per_channel_affine(x, scale, zero, 1, -8, 7, 0.5),
        aten._fake_quantize_learnable_per_tensor_affine(x, scale[:1], zero[1:2], -8, 7, 2.0),
    ]


def _bag_gradients(grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Of four bags, of 1, 3, 0 and 2 indices, in a table of 5 rows."""
    bags = torch.tensor([0, 1, 1, 1, 3, 3], device=grad.device)
    sizes = torch.tensor([1, 3, 0, 2], device=grad.device)
    maxima = torch.tensor([[1] * 4, [0, 1, 4, 0], [-1] * 4, [2] * 4], device=grad.device)
    function = aten._embedding_bag_dense_backward
    return [
        function(grad, rows, bags, sizes, maxima, 5, False, 0, weights),
        function(grad, rows, bags, sizes, maxima, 5, False, 0, weights, 1),
        *(function(grad, rows, bags, sizes, maxima, 5, by_frequency, mode, None) for by_frequency, mode in _BAG_MODES),
    ]


_BAG_MODES = ((False, 0), (True, 0), (False, 1), (True, 1), (False, 2))  # sum, mean, max


# steps of optimizers


def _stepped(name: str, *variants: dict[str, Any]) -> Callable[..., Any]:
    """A step in place, twice and the second time with a gradient scaler, then one that gives new tensors."""
    base, _, overload = name.partition(".")
    in_place, functional = (getattr(getattr(aten, each), overload or "default") for each in (f"{base}_", base))

    def call(lr: Any, scale: torch.Tensor, found: torch.Tensor, *lists: list[torch.Tensor]) -> list[Any]:
        results: list[Any] = []
        for options in variants:
            own = [[tensor.clone() for tensor in given] for given in lists]
            if not options.get("amsgrad", True):
                own[4] = []  # the maxima that only amsgrad has
            scaler = {"grad_scale": scale, "found_inf": found}
            for extra in ({}, scaler, {**scaler, "found_inf": found + 1}):
                in_place(*own, lr=lr, **options, **extra)
                results += [[tensor.clone() for tensor in given] for given in own]
            results += functional(*own, lr=lr, **options)
        return results

    return call


def _optimizer_inputs(states: int, steps: bool, tensor_lr: bool) -> tuple[Any, ...]:
    """A learning rate, a gradient scaler's two tensors, parameters, gradients, `states` and the number of the step."""
    lists = [[_uniform(*shape, seed=number) for shape in ((3,), (2, 4))] for number in range(2 + states)]
    lists += [[torch.tensor(3.0), torch.tensor(5.0)]] if steps else []
    return torch.tensor(0.1) if tensor_lr else 0.1, torch.tensor(4.0), torch.tensor(0.0), *lists


_ADAM = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.2, "eps": 1e-6, "amsgrad": True, "maximize": False}
_SGD = {"weight_decay": 0.2, "momentum": 0.9, "dampening": 0.0, "nesterov": True, "maximize": False}
_ADAGRAD = {"lr_decay": 0.1, "weight_decay": 0.2, "eps": 1e-6, "maximize": False}


def _optimizers() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    ascending = {"amsgrad": False, "weight_decay": 0.0, "maximize": True}
    damped = {"is_first_step": False, "nesterov": False, "dampening": 0.3, "maximize": True}
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "_fused_adagrad": (
            _stepped("_fused_adagrad", _ADAGRAD, {**_ADAGRAD, "maximize": True}),
            _optimizer_inputs(1, True, False),
        )
    }
    for suffix in ("", ".tensor_lr"):
        for name in ("_fused_adam", "_fused_adamw"):
            step = _stepped(name + suffix, _ADAM, {**_ADAM, **ascending})
            calls[name + suffix] = (step, _optimizer_inputs(3, True, bool(suffix)))
        step = _stepped(f"_fused_sgd{suffix}", {**_SGD, "is_first_step": True}, {**_SGD, **damped})
        calls[f"_fused_sgd{suffix}"] = (step, _optimizer_inputs(1, False, bool(suffix)))
    return calls


def _unscaled(*grads: torch.Tensor) -> list[Any]:
    results: list[Any] = []
    for bad in (0.0, float("inf"), float("nan")):
        own, found = [grad + bad for grad in grads], torch.zeros(1, device=grads[0].device)
        inverse = torch.full_like(found, 0.25)
        results += aten._amp_foreach_non_finite_check_and_unscale(own, found, inverse)
        aten._amp_foreach_non_finite_check_and_unscale_(own, found, inverse)
        results += [*own, found]
    return results


def _scales(scale: torch.Tensor) -> list[torch.Tensor]:
    """After a step that leaves the scale, one that lets it grow and one that shrinks it."""
    results: list[torch.Tensor] = []
    tracker, fine = torch.zeros(1, dtype=torch.int32, device=scale.device), torch.zeros_like(scale)
    for found in (fine, fine, fine + 1):
        results += aten._amp_update_scale(scale, tracker, found, 2.0, 0.5, 2)
        aten._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2)
        results += [scale.clone(), tracker.clone()]
    return results


_IMAGE, _GRID = _uniform(2, 3, 5, 4, low=-1), _uniform(2, 6, 7, 2, low=-1.5, high=1.5)
_INTEGERS = torch.arange(12).reshape(3, 4)
_BITS = (_INTEGERS - 5, _INTEGERS % 3 == 0, _INTEGERS.to(torch.uint8))
_SCORES = _uniform(2, 3, 4, 4, low=-2, high=2)
_VOLUME = _uniform(2, 3, 4, 5, 3)

_FILL = (_INTEGERS, torch.tensor(7.0))

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **_optimizers(),
    "_aminmax.dim": (lambda x: [aten._aminmax.dim(x, 1, keep) for keep in (False, True)], (_IMAGE,)),
    "_amp_foreach_non_finite_check_and_unscale": (_unscaled, (_uniform(3), _uniform(2, 4))),
    "_amp_update_scale": (_scales, (torch.tensor([8.0]),)),
    "_dirichlet_grad": (
        aten._dirichlet_grad.default,
        (_uniform(3, 4, low=0.01, high=0.2), _uniform(3, 4), _uniform(3, 4, low=2, high=3)),
    ),
    "_embedding_bag_dense_backward": (
        _bag_gradients,
        (_uniform(4, 4, low=-1), torch.tensor([1, 0, 1, 4, 2, 2]), _uniform(6)),
    ),
    "_fake_quantize_learnable": (
        _graded(_learnable),
        (_uniform(3, 4, low=-1), _uniform(4, low=0.05, high=0.1), torch.tensor([0.0, 2.4, -1.6, 1.0])),
    ),
    "_linalg_eigvals": (aten._linalg_eigvals.default, (_uniform(2, 4, 4, low=-1),)),
    "_logcumsumexp": (lambda x: [aten._logcumsumexp(x * 50, dim) for dim in (0, -1)], (_uniform(3, 4, low=-1),)),
    "_masked_softmax": (
        _graded(_masked_softmax),
        (_SCORES, torch.eye(4).bool(), torch.eye(2, 4).bool(), _SCORES > 1),
    ),
    "_stack": (lambda *x: [aten._stack(x, dim) for dim in (0, 1, -1)], (_uniform(3, 4), _uniform(3, 4, seed=1))),
    "_standard_gamma_grad": (
        aten._standard_gamma_grad.default,
        (_uniform(3, 4, high=3), _uniform(3, 4, low=0.01, high=0.2, seed=1)),  # of larger ones the CPU has 3 digits
    ),
    "_upsample_bicubic2d_aa": (_graded(lambda x: aten._upsample_bicubic2d_aa(x, [3, 6], False)), (_IMAGE,)),
    "_upsample_lanczos2d_aa": (_graded(lambda x: aten._upsample_lanczos2d_aa(x, [3, 6], False)), (_IMAGE,)),
    "_upsample_nearest_exact3d": (_graded(lambda x: aten._upsample_nearest_exact3d(x, [3, 7, 3])), (_VOLUME,)),
    "bitwise_and with a number": (_with_numbers("bitwise_and", 6), _BITS),
    "bitwise_left_shift with a number": (_with_numbers("bitwise_left_shift", 2, False), (_INTEGERS,)),
    "bitwise_or with a number": (_with_numbers("bitwise_or", 6), _BITS),
    "bitwise_right_shift with a number": (_with_numbers("bitwise_right_shift", 2, False), (_INTEGERS,)),
    "bitwise_xor with a number": (_with_numbers("bitwise_xor", 6), _BITS),
    "bmm.dtype": (_product_in("bmm"), (_uniform(2, 3, 4).bfloat16(), _uniform(2, 4, 5).bfloat16())),
    "div.Scalar_mode": (
        lambda *inputs: [
            aten.div.Scalar_mode(x, number, rounding_mode=mode)
            for x in inputs
            for number in (3, -0.7)
            for mode in (None, "floor", "trunc")
        ],
        (_INTEGERS, _IMAGE),
    ),
    "fill.Tensor": (lambda x, value: [aten.fill.Tensor(x, value), aten.fill.Tensor(x > 3, value)], _FILL),
    "glu_jvp": (
        _glu_tangents,
        tuple(_uniform(3, width, low=-1, seed=width + n) for n, width in enumerate((4, 4, 2, 2))),
    ),
    "isin with a number": (_contained, (_INTEGERS,)),
    "mm.dtype": (_product_in("mm"), (_uniform(3, 4).bfloat16(), _uniform(4, 5).bfloat16())),
    "norms in float64": (_norms, (_uniform(3, 4, low=-1),)),
    "samples": (_sampled, (_uniform(40, 3),)),
    "scatter.value_reduce": (
        lambda x, at: [aten.scatter.value_reduce(x, 1, at, 3, reduce=kind) for kind in ("add", "multiply")],
        (_uniform(3, 4), torch.tensor([[0, 1], [2, 2], [3, 0]])),
    ),
    "search of a number": (_searched, (torch.tensor([1.0, 2, 2, 3, 7]),)),
    "special_zeta.self_scalar": (partial(aten.special_zeta.self_scalar, 2.5), (_uniform(4, high=5),)),
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
