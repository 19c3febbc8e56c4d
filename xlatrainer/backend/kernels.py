"""One kernel for each overload of `aten`, and of other libraries' operators that we know, registered for `xla`.

Which kernel an overload gets follows from its schema and the lowerings there are:

- its own lowering: record it;
- it writes arguments (in-place, out=) and its functional twin has a lowering: record that, write the result;
- torch has a kernel of its own that is made of other operators: leave it to torch;
- else the CPU (see `fallback`).

May import: everything in backend below the device.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from xlatrainer.backend import detection_kernels, storage_kernels
from xlatrainer.backend._private_api import AUTOGRAD_KEY, BACKEND_KEY, all_overloads, has_kernel
from xlatrainer.backend.composites import COMPOSITES
from xlatrainer.backend.fallback import run_on_cpu
from xlatrainer.backend.ir import Value
from xlatrainer.backend.lowerings.registry import Lowering, find, foreign, resolve
from xlatrainer.backend.recorder import Recorder
from xlatrainer.backend.schema import Signature, functional_twin, gives_results, makes_tensor, signature
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import assign, from_host, new_tensor

__all__ = ["register_kernels"]

Kernel = Callable[..., Any]
_NATIVE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def _assemble(values: Any, structure: Any) -> Any:
    """Tensors in the structure of an operator's results; see `recorder._Call`."""
    if isinstance(structure, tuple):
        return tuple(_assemble(values, item) for item in structure)
    return new_tensor(next(values)) if structure else None


def _functional(overload: Any, lowering: Lowering) -> Kernel:
    recorder = Recorder(overload, lowering)
    if lowering.mutates:
        return _updating(recorder, lowering)
    is_list = str(overload._schema.returns[0].type) == "List[Tensor]"

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with state.lock:
            values, structure = recorder(args, kwargs)
            if structure is None:
                return new_tensor(values[0])
            results = _assemble(iter(values), structure)
            return list(results) if is_list else results

    return kernel


def _updating(recorder: Recorder, lowering: Lowering) -> Kernel:
    """A kernel that also updates arguments of which the schema does not say so."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with state.lock:
            values, structure = recorder(args, kwargs)
            rest = iter(values)
            results = _assemble(rest, structure)
            given = {**dict(zip(recorder.names, args, strict=False)), **kwargs}
            for name in lowering.mutates:
                if given.get(name) is not None:
                    assign(given[name], next(rest))
            return results

    return kernel


def _in_place(overload: Any, lowering: Lowering, sig: Signature) -> Kernel:
    recorder = Recorder(overload, lowering, sig.written)
    positions = [recorder.names.index(name) for name in sig.written]
    returns = len(overload._schema.returns)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with state.lock:
            values, _ = recorder(args, kwargs)
            written = [args[p] if p < len(args) else kwargs[recorder.names[p]] for p in positions]
            rest = iter(values)
            for item in written:
                for tensor in item if isinstance(item, list) else (item,):
                    assign(tensor, next(rest))
        if not returns:
            return None
        return written[0] if returns == 1 else tuple(written)

    return kernel


def _with_results(twin: Any, lowering: Lowering, sig: Signature) -> Kernel:
    """A kernel that returns the first results of the twin and writes the others to arguments."""
    recorder = Recorder(twin, lowering)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with state.lock:
            values, structure = recorder(args, kwargs)
            rest = iter(values)
            results = _assemble(rest, structure[: -len(sig.written)])
            given = {**dict(zip(recorder.names, args, strict=False)), **kwargs}
            for name in sig.written:
                assign(given[name], next(rest))
            return results if len(results) > 1 else results[0]

    return kernel


def _out(twin: Any, lowering: Lowering, sig: Signature) -> Kernel:
    recorder = Recorder(twin, lowering)
    factory = makes_tensor(twin)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in sig.written]
        if factory:
            kwargs = {"dtype": outs[0].dtype, "device": outs[0].device, **kwargs}
        with state.lock:
            values, _ = recorder(args, kwargs)
            targets = [tensor for out in outs for tensor in (out if isinstance(out, list) else [out])]
            for target, value in zip(targets, values, strict=True):
                _write_out(recorder.name, target, value)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return kernel


def _write_out(name: str, out: torch.Tensor, value: Value) -> None:
    spec = value.spec
    if not torch.can_cast(spec.dtype, out.dtype):
        raise RuntimeError(
            f"result type {_type_name(spec.dtype)} can't be cast to the desired output type {_type_name(out.dtype)}"
            f" (out= of {name})"
        )
    if tuple(out.shape) != spec.shape:
        if math.prod(out.shape):
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(out.shape)}, which "
                f"does not match the required output shape {list(spec.shape)} (out= of {name}). Resize it "
                "first: `out.resize_(0)`",
                UserWarning,
                stacklevel=2,
            )
        storage_kernels.resize_(out, spec.shape)
    assign(out, value)


_TYPE_NAMES = {
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
    torch.bool: "Bool", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip


def _type_name(dtype: torch.dtype) -> str:
    return _TYPE_NAMES.get(dtype, str(dtype))


def _cpu(overload: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run_on_cpu(overload, args, kwargs)

    return kernel


def _guarded(kernel: Kernel, overload: Any, lowering: Lowering) -> Kernel:
    """`kernel`, or the CPU for the calls that the lowering says it cannot express."""
    supports = lowering.supports
    if supports is None:
        return kernel

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if supports(*args, **kwargs):
            return kernel(*args, **kwargs)
        return run_on_cpu(overload, args, kwargs)

    return guarded


def _moving_indices(kernel: Kernel, position: int) -> Kernel:
    """`kernel` for an operator whose list of index tensors may lie on the CPU (`tensor[[0, 2]]`), as on any device."""

    def moving(*args: Any, **kwargs: Any) -> Any:
        with state.lock:
            indices = [
                new_tensor(from_host(index)) if index is not None and index.device.type == "cpu" else index
                for index in args[position]
            ]
        return kernel(*args[:position], indices, *args[position + 1 :], **kwargs)

    return moving


def _kernel_for(overload: Any) -> Kernel | None:
    """The kernel of an overload, or None to leave it to torch or to the fallback."""
    kernel = _recording_kernel_for(overload)
    for position, argument in enumerate(overload._schema.arguments):
        if kernel is not None and argument.name == "indices" and str(argument.type) == "List[Optional[Tensor]]":
            return _moving_indices(kernel, position)
    return kernel


def _recording_kernel_for(overload: Any) -> Kernel | None:
    lowering = find(overload.name())
    if lowering is not None:
        return _guarded(_functional(overload, lowering), overload, lowering)
    sig = signature(overload)
    if not sig.functional and not has_kernel(overload, "CompositeImplicitAutograd"):
        twin = functional_twin(overload)
        lowering = find(twin.name()) if twin is not None else None
        if lowering is not None:
            if sig.out:
                kernel = _out(twin, lowering, sig)
            elif gives_results(overload):
                kernel = _with_results(twin, lowering, sig)
            else:
                kernel = _in_place(overload, lowering, sig)
            return _guarded(kernel, overload, lowering)
    if any(has_kernel(overload, key) for key in _NATIVE):
        return None
    # What torch registers under this key is made of other operators, unless there is a kernel for the CPU too: then it
    # is a structured operator, of which torch makes `empty` and an out= call, which would hide it from the fallback.
    structured = has_kernel(overload, "CompositeExplicitAutogradNonFunctional") and has_kernel(overload, "CPU")
    return _cpu(overload) if structured else None


def _foreign_kernel(lowering: Lowering) -> Kernel:
    """A kernel of an operator that another library defines, perhaps later: it is looked up at the first call."""
    kernel: Kernel | None = None

    def first_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal kernel
        if kernel is None:
            overload = resolve(lowering.name)
            kernel = _guarded(_functional(overload, lowering), overload, lowering)
        return kernel(*args, **kwargs)

    return first_call


def _register_foreign_kernels() -> None:
    """torch takes kernels of operators that are not defined yet, so no library is imported for this."""
    kernels = {name: _foreign_kernel(lowering) for name, lowering in foreign().items()}
    for name, kernel in {**kernels, **detection_kernels.kernels()}.items():
        namespace, _, operator = name.partition("::")
        library = torch.library.Library(namespace, "IMPL")
        _libraries.append(library)
        library.impl(operator, kernel, BACKEND_KEY)


_libraries: list[torch.library.Library] = []


def register_kernels() -> None:
    """Register all kernels. Once a process; torch keeps them."""
    aten = torch.library.Library("aten", "IMPL")
    rest = torch.library.Library("_", "IMPL")
    _libraries.extend((aten, rest))
    by_hand = storage_kernels.kernels()
    for overload in all_overloads():
        name = overload.name()
        kernel = by_hand.get(name) or _kernel_for(overload)
        if kernel is not None:
            aten.impl(name.removeprefix("aten::"), kernel, BACKEND_KEY)
    for composite, function in COMPOSITES.items():
        for key in (AUTOGRAD_KEY, BACKEND_KEY):
            aten.impl(composite, function, key)
    _register_foreign_kernels()
    rest.fallback(run_fallback, BACKEND_KEY)


def run_fallback(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """The boxed fallback: whatever has no kernel at all, custom operators included."""
    return run_on_cpu(overload, args, kwargs)
