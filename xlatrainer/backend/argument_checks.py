"""What CPU kernels say of shapes and options that torch's meta kernels let pass.

A function here has the arguments of its operator, with meta tensors, and raises what the CPU raises; it is called where
shapes are inferred, once for each kind of call.

May import: torch.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

__all__ = ["check_arguments", "number_check"]


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *rest: Any,
) -> None:
    if any(step <= 0 for step in dilation):
        raise RuntimeError(f"dilation should be greater than zero, but got {list(dilation)} (aten::convolution)")
    if any(amount < 0 for amount in padding):
        raise RuntimeError(f"negative padding is not supported, but got {list(padding)} (aten::convolution)")
    if any(step <= 0 for step in stride):
        raise RuntimeError(f"non-positive stride is not supported, but got {list(stride)} (aten::convolution)")


def _index_add(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, **options: Any) -> None:
    dim = dim % self.dim() if self.dim() else 0
    mine, theirs = list(self.shape), list(source.shape)
    if len(mine) != len(theirs) or mine[:dim] + mine[dim + 1 :] != theirs[:dim] + theirs[dim + 1 :]:
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = "
            f"{mine} source.shape = {theirs} (aten::index_add, dim {dim})"
        )


def _as_strided_scatter(
    self: torch.Tensor, src: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> None:
    offset = storage_offset or 0
    reached = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1
    there = self.numel()
    if 0 not in size and (reached > there or offset < 0):
        itemsize = self.element_size()
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {itemsize} "
            f"requiring a storage size of {reached * itemsize} are out of bounds for storage of size {there * itemsize}"
        )


def _histogramdd(self: torch.Tensor, bins: Sequence[Any], **options: Any) -> None:
    if not self.dim() or len(bins) != self.shape[-1]:
        raise RuntimeError(
            "histogramdd: The size of bins must be equal to the innermost dimension of the input, but got "
            f"{len(bins)} bins for an input with shape {list(self.shape)}"
        )


def _boundaries(self: Any, boundaries: torch.Tensor, **options: Any) -> None:
    if boundaries.dim() != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()}) (aten::bucketize)")


def _segment_reduce(data: torch.Tensor, reduce: str, **options: Any) -> None:
    if not data.is_floating_point():
        raise NotImplementedError(f"aten::segment_reduce is not implemented for {data.dtype}")


def _pow(self: torch.Tensor, exponent: Any) -> None:
    if isinstance(exponent, int) and not self.is_floating_point() and not self.is_complex():
        _check_limits(_limits(torch.result_type(self, exponent)), [exponent])


def _random_bounds(self: Any, first: Any = 0, last: Any = None, *rest: Any, **options: Any) -> None:
    """`random_` and, without `self`, `randint`."""
    low, high = (0, first) if last is None else (first, last)
    if low >= high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")


def _randint(*bounds_and_size: Any, **options: Any) -> None:
    _random_bounds(None, *bounds_and_size[:-1])


def _randint_like(self: torch.Tensor, *bounds: Any, **options: Any) -> None:
    if not any(isinstance(bound, torch.Tensor) for bound in bounds):
        _random_bounds(self, *bounds)


MAX_CATEGORIES = 2**24  # whole numbers that float32 has one after the other


def _multinomial(
    self: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> None:
    if not 1 <= self.dim() <= 2 or not self.is_floating_point():
        return  # the CPU's kernel is asked
    if num_samples <= 0:
        raise RuntimeError(f"cannot sample n_sample <= 0 samples, got {num_samples} (aten::multinomial)")
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError(
            f"cannot sample n_sample > prob_dist.size(-1) samples without replacement: {num_samples} of "
            f"{self.shape[-1]} (aten::multinomial)"
        )
    if self.shape[-1] > MAX_CATEGORIES:
        raise RuntimeError(f"number of categories cannot exceed 2^24, got {self.shape[-1]} (aten::multinomial)")


_CHECKS: dict[str, Callable[..., None]] = {
    "aten::_histogramdd_bin_edges": _histogramdd,
    "aten::_histogramdd_from_bin_cts": _histogramdd,
    "aten::_histogramdd_from_bin_tensors": _histogramdd,
    "aten::as_strided_scatter": _as_strided_scatter,
    "aten::bucketize.Scalar": _boundaries,
    "aten::bucketize.Tensor": _boundaries,
    "aten::convolution": _convolution,
    "aten::index_add": _index_add,
    "aten::index_add_": _index_add,
    "aten::multinomial": _multinomial,
    "aten::pow.Tensor_Scalar": _pow,
    "aten::randint": _randint,
    "aten::randint.low": _randint,
    "aten::randint_like": _randint_like,
    "aten::randint_like.low_dtype": _randint_like,
    "aten::random_.from": _random_bounds,
    "aten::random_.to": _random_bounds,
    "aten::segment_reduce": _segment_reduce,
}


def check_arguments(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what the CPU raises for these arguments, meta tensors among them, beyond what shape inference says."""
    check = _CHECKS.get(overload.name())
    if check is not None:
        check(*args, **kwargs)


class _Limits(NamedTuple):
    """What a number may be that is converted to `dtype`."""

    low: float
    high: float
    dtype: torch.dtype


# These convert their numbers to the dtype of the result, and refuse what it cannot hold.
_CONVERTING = """
    clamp clamp_max clamp_min constant_pad_nd fill full full_like index_fill masked_fill new_full scalar_tensor scatter
    where
    """
_CONVERTS = frozenset(f"aten::{name}" for name in _CONVERTING.split())

_C_TYPES = {
    torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int", torch.int64: "int64_t", torch.uint8: "uint8_t",
    torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float",
}  # fmt: skip


def _limits(dtype: torch.dtype) -> _Limits | None:
    if dtype not in _C_TYPES:
        return None
    if dtype.is_floating_point:
        high = torch.finfo(dtype).max
        return _Limits(-high, high, dtype)
    whole = torch.iinfo(dtype)
    return _Limits(whole.min if whole.min else -whole.max, whole.max, dtype)  # -1 of an unsigned type is its largest


class _Rule(NamedTuple):
    """What must hold of some of an operator's numbers; `message` is formatted with them."""

    arguments: tuple[str, ...]
    holds: Callable[..., bool]
    message: str


_RULES = {
    "aten::bernoulli": _Rule(("p",), lambda p: 0 <= p <= 1, "bernoulli_ expects p to be in [0, 1], but got p={}"),
    "aten::cauchy": _Rule(("sigma",), lambda s: s > 0, "cauchy_ expects sigma > 0.0, but found sigma={}"),
    "aten::exponential": _Rule(("lambd",), lambda v: v > 0, "exponential_ expects lambda > 0.0, but found lambda={}"),
    "aten::geometric": _Rule(("p",), lambda p: 0 < p < 1, "geometric_ expects p to be in (0, 1), but got p={}"),
    "aten::huber_loss": _Rule(
        ("delta",), lambda d: d > 0, "huber_loss does not support non-positive values for delta, but got {}"
    ),
    "aten::log_normal": _Rule(("std",), lambda s: s > 0, "log_normal_ expects std > 0.0, but found std={}"),
    "aten::normal": _Rule(("std",), lambda s: s >= 0, "normal expects std >= 0.0, but found std {}"),
    "aten::renorm": _Rule(("maxnorm",), lambda m: m >= 0, "renorm: expected maxnorm to be >= 0 but got {}"),
    "aten::smooth_l1_loss": _Rule(
        ("beta",), lambda b: b >= 0, "smooth_l1_loss does not support negative values for beta, but got {}"
    ),
    "aten::softshrink": _Rule(("lambd",), lambda v: v >= 0, "lambda must be greater or equal to 0, but found to be {}"),
    "aten::uniform": _Rule(
        ("from", "to"),
        lambda low, high: low <= high,
        "uniform_ expects to return a [from, to) range, but found from={:g} > to={:g}",
    ),
}


def number_check(
    overload: Any, dtype: torch.dtype, numbers: dict[str, float], lifted: Collection[Any]
) -> Callable[[Sequence[float]], None] | None:
    """What to call with the lifted numbers of each call of an operator; None for nothing.

    Args:
        overload: the operator.
        dtype: of its (first) result.
        numbers: the Python numbers of this call by argument, in order.
        lifted: the arguments that may be other numbers in other calls of this kind; the rest is checked now.
    """
    base = overload._schema.name.removesuffix("_")
    limits = _limits(dtype) if base in _CONVERTS else None
    if limits is not None:
        return partial(_check_limits, limits)
    rule = _RULES.get(base)
    if rule is None:
        return None
    names = [name for name in numbers if name in lifted]
    constants = {argument.name: argument.default_value for argument in overload._schema.arguments} | numbers
    if not all(isinstance(constants.get(name), int | float) for name in rule.arguments):  # another overload
        return None
    sources = [names.index(name) if name in names else float(constants[name]) for name in rule.arguments]
    if any(isinstance(source, int) for source in sources):
        return partial(_check_rule, rule, sources)
    _check_rule(rule, sources, ())
    return None


def _check_rule(rule: _Rule, sources: Sequence[int | float], numbers: Sequence[float]) -> None:
    """Each source is a position among the numbers (an int), or a constant (a float)."""
    given = [numbers[source] if isinstance(source, int) else source for source in sources]
    if not rule.holds(*given):
        raise RuntimeError(rule.message.format(*given))


def _check_limits(limits: _Limits | None, numbers: Sequence[float]) -> None:
    """Raise `RuntimeError` for a number that is not within the limits; infinities and nan are."""
    if limits is None:
        return
    for number in numbers:
        if (number < limits.low or number > limits.high) and not math.isinf(number):
            raise RuntimeError(
                f"value cannot be converted to type {_C_TYPES[limits.dtype]} without overflow: {number} is not in "
                f"{limits.dtype}"
            )
