"""Errors of the CPU for calls that torch's meta kernels accept, or refuse in other words.

Shapes come from meta kernels, which seldom look at dtypes: what `"bitwise_and_cpu" not implemented for 'Float'` says is
known to the CPU's kernel alone. It is asked once for each combination of dtypes of an operator, with small tensors of
our own making, when a call of a new kind is recorded; a call that was recorded before costs nothing.

- The dtypes of a call are refused as on the CPU (`NotImplementedError` in most cases).
- Where the meta kernel raises, the call fails with the CPU's own error, if the CPU has one.
- Other errors of the trial calls count for nothing: they may come from the data or the shapes that were made up.

May import: torch, argument_checks, ir, shapes, _private_api.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from xlatrainer.backend._private_api import has_kernel
from xlatrainer.backend.argument_checks import check_arguments
from xlatrainer.backend.ir import Spec, make_spec
from xlatrainer.backend.shapes import as_meta, infer, meta_tensor

__all__ = ["infer_or_refuse", "refuse_alias", "refuse_out_dtype"]

_MAX_ELEMENTS = 2**14  # of a trial call, what it takes and gives together
_MAX_ELEMENTS_OF_A_WRONG_CALL = 2**20  # that is never repeated
_LENGTHS = (2, 3, 5)  # to which dims of large tensors are cut; a window or a coordinate may want more than two

# What CPU kernels say of a dtype. Anything else may be about shapes or data.
_ABOUT_DTYPES = re.compile(
    r"not implemented|support|dtype|scalar type|complex|result type|integer|bool|both inputs to be|Expected data type"
)

# The CPU refuses half precision here, torch's CUDA kernels do not: models are trained in half precision on GPU and TPU.
_HALF_OPERATORS = """
    _upsample_bilinear2d_aa avg_pool3d multi_margin_loss multilabel_margin_loss_forward polygamma round.decimals
    rrelu_with_noise_ rrelu_with_noise_functional
    """
_HALF = (torch.float16, torch.bfloat16)
# Libraries take the CPU for the exception: transformers counts with an integer `histc` on all other devices.
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ELSEWHERE = {
    **{f"aten::{name}": _HALF for name in _HALF_OPERATORS.split()},
    "aten::histc": _INTEGERS,
}

_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)

# By kinds of arguments what the CPU said; None where it took them.
_verdicts: dict[tuple[Any, ...], Exception | None] = {}


def infer_or_refuse(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`shapes.infer`, which see, for a call that the CPU does not refuse; raises the CPU's errors."""
    try:
        result = infer(overload, args, kwargs)
    except Exception:
        if not _can_ask(overload) or _elements(_tensors((args, kwargs))) > _MAX_ELEMENTS_OF_A_WRONG_CALL:
            raise
        error = _error(overload, args, kwargs)
        if error is None:
            raise
        raise error from None
    check_arguments(overload, args, kwargs)
    if _can_ask(overload):
        error = _dtype_error(overload, args, kwargs, result)
        if error is not None:
            raise error
    return result


_FOR_OTHER_DEVICES = frozenset({"aten::convolution_overrideable"})  # the CPU's kernel says that it is not for the CPU


def _can_ask(overload: Any) -> bool:
    """Gradients are called by autograd with what their operator has accepted, and trust it blindly."""
    if "backward" in overload.name() or overload.name() in _FOR_OTHER_DEVICES:
        return False
    return any(has_kernel(overload, key) for key in ("CPU", "CompositeExplicitAutograd"))


def _dtype_error(overload: Any, args: Any, kwargs: Any, result: Any) -> Exception | None:
    """What the CPU says of the dtypes; the same dtypes are asked for once."""
    tensors = list(_tensors((args, kwargs)))
    taken = _ELSEWHERE.get(overload.name(), ())
    if any(tensor.dtype in taken for tensor in tensors):
        return None
    key = (overload, torch.get_default_dtype(), _kinds(args), _kinds(tuple(kwargs.items())))
    nothing = any(tensor.numel() == 0 for tensor in tensors)  # for which many CPU kernels return before they look
    if key in _verdicts and not nothing:
        error = _verdicts[key]
        return None if error is None else type(error)(*error.args)
    for trial_args, trial_kwargs, _ in _trials(overload, args, kwargs, result):
        error = _error(overload, trial_args, trial_kwargs)
        refused = isinstance(error, NotImplementedError) or bool(_ABOUT_DTYPES.search(str(error or "")))
        if error is None or refused:
            if not nothing:
                _verdicts[key] = None if error is None else type(error)(*error.args)  # without its frames
            return error
    return None


def refuse_out_dtype(
    overload: Any, twin: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: dict[str, Any], result: Any
) -> None:
    """Raise what the CPU raises where the dtypes of `out=` arguments are not those of the results.

    Args:
        overload: the one with `out=` arguments.
        twin: the functional one.
        args, kwargs: the call's arguments without `outs`.
        outs: the `out=` arguments by name.
        result: the specs of the results in the structure of `outs`.
    """
    args, kwargs = [as_meta(arg) for arg in args], {name: as_meta(arg) for name, arg in kwargs.items()}
    key = (overload, torch.get_default_dtype(), _kinds(args), _kinds(tuple(kwargs.items())), _kinds([*outs.values()]))
    if key in _verdicts:
        return
    asked = False
    for trial_args, trial_kwargs, small in _trials(twin, args, kwargs, result):
        wanted = small if len(outs) > 1 else (small,)
        made = {name: _with_dtype(spec, out) for spec, (name, out) in zip(wanted, outs.items(), strict=True)}
        error = _error(overload, trial_args, {**trial_kwargs, **made})
        if error is not None and not isinstance(error, torch.linalg.LinAlgError):
            raise error  # with the right dtypes the call was accepted; a matrix of ones is singular
        asked = True
    for out, spec in zip(_tensors([*outs.values()]), _flat_specs(result), strict=True):
        if not asked and not torch.can_cast(spec.dtype, out.dtype):
            raise RuntimeError(
                f"result type {spec.dtype} can't be cast to the desired output type {out.dtype} (out= of "
                f"{overload.name()})"
            )
    _verdicts[key] = None


def _with_dtype(spec: Any, out: Any) -> Any:
    """Meta tensors of these shapes with the dtypes of `out`."""
    if isinstance(spec, Spec):
        return meta_tensor(make_spec(spec.shape, out.dtype))
    return [_with_dtype(one, other) for one, other in zip(spec, out, strict=True)]


def refuse_alias(
    overload: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: dict[str, Any], same: Sequence[Any]
) -> None:
    """Raise what the CPU raises where an `out=` argument is the same memory as the inputs `same`.

    Elementwise operators allow it, those that read an input more than once do not.
    """
    ids = {id(tensor) for tensor in same} | {id(out) for out in _tensors([*outs.values()])}
    small_enough = _elements(_tensors((args, kwargs, outs))) <= _MAX_ELEMENTS
    shared: dict[Any, torch.Tensor] = {}

    def small(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor) and arg.device.type == "xla":
            made = _make(as_meta(arg) if small_enough else _cut(as_meta(arg), _LENGTHS[0]), "")
            return shared.setdefault((tuple(made.shape), made.dtype), made) if id(arg) in ids else made
        if isinstance(arg, list | tuple):
            return [small(item) for item in arg]
        return torch.device("cpu") if isinstance(arg, torch.device) else arg

    error = _error(overload, [small(arg) for arg in args], {n: small(arg) for n, arg in {**kwargs, **outs}.items()})
    if error is not None and "single memory location" in str(error):
        raise error


def _kinds(arg: Any) -> Any:
    """What a dtype's verdict may depend on."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.dim()
    if isinstance(arg, list | tuple):
        return tuple(_kinds(item) for item in arg)
    return type(arg) if isinstance(arg, int | float | complex) and not isinstance(arg, bool) else arg


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


def _elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _flat_specs(result: Any) -> Iterator[Spec]:
    if isinstance(result, Spec):
        yield result
    elif isinstance(result, tuple):
        for item in result:
            yield from _flat_specs(item)


def _elements_of_results(result: Any) -> int:
    return sum(spec.numel for spec in _flat_specs(result))


def _trials(overload: Any, args: Any, kwargs: Any, result: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The call's own arguments if they are small, else with all dims cut to one length, where those make sense.

    With each the specs of its results.
    """
    if _elements(_tensors((args, kwargs))) + _elements_of_results(result) <= _MAX_ELEMENTS:
        yield args, kwargs, result
        return
    if "fft" in overload.name():  # whose kernels trust the lengths that they are given beside the tensor
        return
    for length in _LENGTHS:
        cut_args, cut_kwargs = _cut(args, length), {name: _cut(arg, length) for name, arg in kwargs.items()}
        try:
            small = infer(overload, cut_args, cut_kwargs)
        except _REFUSALS:
            continue
        if _elements(_tensors((cut_args, cut_kwargs))) + _elements_of_results(small) <= _MAX_ELEMENTS:
            yield cut_args, cut_kwargs, small


def _cut(arg: Any, length: int) -> Any:
    if isinstance(arg, torch.Tensor):
        return meta_tensor(make_spec(tuple(min(n, length) for n in arg.shape), arg.dtype)) if arg.dim() else arg
    return [_cut(item, length) for item in arg] if isinstance(arg, list | tuple) else arg


def _error(overload: Any, args: Any, kwargs: Any) -> Exception | None:
    try:
        _run(overload, args, kwargs)
    except _REFUSALS as error:
        return error
    return None


def _run(overload: Any, args: Any, kwargs: Any) -> None:
    """Call the CPU's kernel with tensors of ones, or zeros where they are integers, for indices are."""
    names = [argument.name for argument in overload._schema.arguments]
    made_args = [_make(arg, name) for name, arg in zip(names, args, strict=False)]
    made_kwargs = {name: _make(arg, name) for name, arg in kwargs.items()}
    generator = torch.get_rng_state()
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            overload(*made_args, **made_kwargs)
    finally:
        torch.set_rng_state(generator)


def _make(arg: Any, name: str) -> Any:
    if isinstance(arg, torch.Tensor) and arg.device.type == "meta":
        counts_from_one = "pivots" in name
        fill = 0 if not (arg.is_floating_point() or arg.is_complex() or counts_from_one) else 1
        return torch.full(arg.shape, fill + 1j if arg.is_complex() else fill, dtype=arg.dtype, device="cpu")
    if isinstance(arg, list | tuple):
        return [_make(item, name) for item in arg]
    return torch.device("cpu") if isinstance(arg, torch.device) else arg
