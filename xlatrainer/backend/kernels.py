"""One kernel for each overload of `aten`, registered with torch for the `xla` device.

Which kernel an overload gets follows from its schema and the lowerings there are:

- its own lowering: record it;
- it writes arguments (in-place, out=) and its functional twin has a lowering: record that, write the result;
- torch has a kernel of its own that is made of other operators: leave it to torch;
- else the CPU (see `fallback`).

May import: everything in backend below the device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from xlatrainer.backend import storage_kernels
from xlatrainer.backend._private_api import AUTOGRAD_KEY, BACKEND_KEY, all_overloads, has_kernel
from xlatrainer.backend.composites import COMPOSITES
from xlatrainer.backend.cpu_errors import refuse_out_dtype
from xlatrainer.backend.fallback import run_on_cpu
from xlatrainer.backend.ir import Value
from xlatrainer.backend.lowerings.registry import Lowering, find
from xlatrainer.backend.overlap import check_written, plain_tensors
from xlatrainer.backend.recorder import Recorder
from xlatrainer.backend.schema import Signature, functional_twin, gives_results, makes_tensor, signature
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import assign, from_host, new_tensor
from xlatrainer.backend.writing import check_devices, check_memory, fit, is_plain, takes_dtype_of_out

__all__ = ["register_kernels"]

Kernel = Callable[..., Any]
_NATIVE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def _assemble(values: Any, structure: Any) -> Any:
    """Tensors in the structure of an operator's results; see `recorder._Call`."""
    if isinstance(structure, tuple):
        return tuple(_assemble(values, item) for item in structure)
    return new_tensor(next(values)) if structure else None


def _specs(values: Any, structure: Any) -> Any:
    """Specs in the structure of an operator's results."""
    if isinstance(structure, tuple):
        return tuple(_specs(values, item) for item in structure)
    return next(values).spec if structure else None


def _is_list(overload: Any) -> bool:
    return str(overload._schema.returns[0].type) == "List[Tensor]"


def _functional(overload: Any, lowering: Lowering) -> Kernel:
    recorder = Recorder(overload, lowering)
    if lowering.mutates:
        return _updating(recorder, lowering)
    is_list = _is_list(overload)

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
            _update(recorder, lowering, args, kwargs, rest)
            return results

    return kernel


def _update(recorder: Recorder, lowering: Lowering, args: Any, kwargs: Any, values: Iterator[Value]) -> None:
    """Assign what follows an operator's results to the arguments that it updates unsaid."""
    if lowering.mutates:
        given = {**dict(zip(recorder.names, args, strict=False)), **kwargs}
        for name in lowering.mutates:
            if given.get(name) is not None:
                assign(given[name], next(values))


def _in_place(overload: Any, lowering: Lowering, sig: Signature) -> Kernel:
    recorder = Recorder(overload, lowering, sig.written)
    positions = [recorder.names.index(name) for name in sig.written]
    returns = len(overload._schema.returns)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with state.lock:
            values, _ = recorder(args, kwargs)
            written = [args[p] if p < len(args) else kwargs[recorder.names[p]] for p in positions]
            if recorder.saw_view:
                check_written(recorder.name, written[0], plain_tensors(args[1:]))
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


def _out(overload: Any, twin: Any, lowering: Lowering, sig: Signature) -> Kernel:
    recorder = Recorder(twin, lowering)
    factory = makes_tensor(twin)
    single = len(sig.written) == 1 and not lowering.mutates and len(twin._schema.returns) == 1 and not _is_list(twin)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        outs = {name: kwargs.pop(name) for name in sig.written}
        given = [*outs.values()]
        targets = plain_tensors(given)
        check_devices(overload, targets)
        if factory:
            kwargs = {"dtype": targets[0].dtype, "device": targets[0].device, **kwargs}
        with state.lock:
            values, structure = recorder(args, kwargs)
            if single and is_plain(targets[0], values[0].spec, args):
                assign(targets[0], values[0])
                return targets[0]
            if any(target.dtype is not value.spec.dtype for target, value in zip(targets, values, strict=False)):
                result = values[0].spec if structure is None else _specs(iter(values), structure)
                refuse_out_dtype(overload, twin, args, kwargs, outs, result)
                if takes_dtype_of_out(overload, kwargs):
                    values, _ = recorder(args, {**kwargs, "dtype": targets[0].dtype})
            check_memory(overload, outs, args, kwargs)
            resized = [fit(recorder.name, out, value.spec) for out, value in zip(targets, values, strict=False)]
            if any(resized):  # what has grown may meet an input now
                check_memory(overload, outs, args, kwargs)
            for target, value in zip(targets, values, strict=False):
                assign(target, value)
            _update(recorder, lowering, args, kwargs, iter(values[len(targets) :]))
        return given[0] if len(given) == 1 else tuple(given)

    return kernel


def _cpu(overload: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run_on_cpu(overload, args, kwargs)

    return kernel


def _guarded(kernel: Kernel, overload: Any, lowering: Lowering) -> Kernel:
    """`kernel`, or the CPU for the calls that the lowering says it cannot express."""
    supports = lowering.supports
    if supports is None:
        return kernel
    outs = {argument.name for argument in overload._schema.arguments if argument.is_out}

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if supports(*args, **{name: arg for name, arg in kwargs.items() if name not in outs}):
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
                kernel = _out(overload, twin, lowering, sig)
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
    rest.fallback(run_fallback, BACKEND_KEY)


def run_fallback(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """The boxed fallback: whatever has no kernel at all, custom operators included."""
    return run_on_cpu(overload, args, kwargs)
