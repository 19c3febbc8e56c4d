"""One kernel for each overload of `aten`, and of other libraries' operators that we know, registered for `xla`.

Which kernel an overload gets follows from its schema and the lowerings there are:

- its own lowering: record it;
- it writes arguments (in-place, out=) and its functional twin has a lowering: record that, write the result;
- torch has a kernel of its own that is made of other operators: leave it to torch;
- else the CPU (see `fallback`).

May import: everything in backend below the device.
"""

import enum
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from xlatrainer.backend import counted_kernels, detection_kernels, inference_kernels, storage_kernels
from xlatrainer.backend._private_api import AUTOGRAD_KEY, BACKEND_KEY, all_overloads, has_kernel
from xlatrainer.backend.composites import COMPOSITES
from xlatrainer.backend.cpu_errors import refuse_out_dtype
from xlatrainer.backend.fallback import run_on_cpu
from xlatrainer.backend.gradients import GRADIENTS
from xlatrainer.backend.ir import Value
from xlatrainer.backend.lowerings.registry import Lowering, find, foreign, resolve
from xlatrainer.backend.overlap import check_written, plain_tensors
from xlatrainer.backend.packed_sequences import PACKING
from xlatrainer.backend.recorder import Recorder
from xlatrainer.backend.schema import (
    Signature,
    by_name,
    functional_twin,
    gives_results,
    makes_tensor,
    signature,
)
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import assign, new_tensor
from xlatrainer.backend.writing import check_devices, check_memory, fit, is_plain, takes_dtype_of_out

__all__ = ["Plan", "Served", "plan", "register_kernels"]

Kernel = Callable[..., Any]
_STRUCTURED = "CompositeExplicitAutogradNonFunctional"
_NATIVE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def _assemble(values: Any, structure: Any) -> Any:
    """Tensors in the structure of an operator's results; see `recorder._Call`."""
    if structure is True:
        return new_tensor(next(values))
    return tuple([_assemble(values, item) for item in structure]) if isinstance(structure, tuple) else None


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
        return _updating(recorder)
    is_list = _is_list(overload)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with state.lock:
            values, structure = recorder.record(args, kwargs)
            if structure is None:
                return new_tensor(values[0])
            results = _assemble(iter(values), structure)
            return list(results) if is_list else results

    return kernel


def _updating(recorder: Recorder) -> Kernel:
    """A kernel that also updates arguments of which the schema does not say so."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with state.lock:
            values, structure = recorder.record(args, kwargs)
            rest = iter(values)
            results = _assemble(rest, structure)
            _update(recorder, args, kwargs, rest)
            return results

    return kernel


def _update(recorder: Recorder, args: Any, kwargs: Any, values: Iterator[Value]) -> None:
    """Assign what follows an operator's results to the arguments that it updates unsaid."""
    for position, name in recorder.updated:
        updated = args[position] if position < len(args) else kwargs.get(name)
        if updated is not None:
            assign(updated, next(values))


def _in_place(overload: Any, lowering: Lowering, sig: Signature) -> Kernel:
    recorder = Recorder(overload, lowering, sig.written)
    positions = [recorder.names.index(name) for name in sig.written]
    returns = len(overload._schema.returns)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with state.lock:
            values, _ = recorder.record(args, kwargs)
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
            values, structure = recorder.record(args, kwargs)
            rest = iter(values)
            results = _assemble(rest, structure[: -len(sig.written)])
            given = by_name(recorder.names, args, kwargs)
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
            values, structure = recorder.record(args, kwargs)
            if single and is_plain(targets[0], values[0].spec, args):
                assign(targets[0], values[0])
                return targets[0]
            if any(target.dtype is not value.spec.dtype for target, value in zip(targets, values, strict=False)):
                result = values[0].spec if structure is None else _specs(iter(values), structure)
                refuse_out_dtype(overload, twin, args, kwargs, outs, result)
                if takes_dtype_of_out(overload, kwargs):
                    values, _ = recorder.record(args, {**kwargs, "dtype": targets[0].dtype})
            check_memory(overload, outs, args, kwargs)
            resized = [fit(recorder.name, out, value.spec) for out, value in zip(targets, values, strict=False)]
            if any(resized):  # what has grown may meet an input now
                check_memory(overload, outs, args, kwargs)
            for target, value in zip(targets, values, strict=False):
                assign(target, value)
            _update(recorder, args, kwargs, iter(values[len(targets) :]))
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


class Served(enum.Enum):
    """How calls of an overload run on the device."""

    LOWERING = "lowering"
    TWIN = "lowering of the functional form"
    BY_HAND = "kernel of its own"
    COMPOSITE = "composition of its own"
    TORCH = "made of others by torch"
    CPU = "on the CPU"


class Plan(NamedTuple):
    """How calls of an overload run, and what of: the lowering, and for a form that writes the twin it belongs to."""

    served: Served
    lowering: Lowering | None = None
    twin: Any = None


_by_hand = {**storage_kernels.kernels(), **counted_kernels.kernels(), **inference_kernels.kernels()}


def plan(overload: Any) -> Plan:
    """How calls of `overload`, an `OpOverload` of `aten`, run on the device."""
    name = overload.name()
    if name.removeprefix("aten::") in COMPOSITES or name.removeprefix("aten::") in PACKING:
        return Plan(Served.COMPOSITE)
    if name in _by_hand:
        return Plan(Served.BY_HAND)
    lowering = find(name)
    if lowering is not None:
        return Plan(Served.LOWERING, lowering)
    if not signature(overload).functional and not has_kernel(overload, "CompositeImplicitAutograd"):
        twin = functional_twin(overload)
        lowering = find(twin.name()) if twin is not None else None
        if lowering is not None:
            return Plan(Served.TWIN, lowering, twin)
    if any(has_kernel(overload, key) for key in _NATIVE):
        return Plan(Served.TORCH)
    # What torch registers under this key is made of other operators, unless there is a kernel for the CPU too.
    composed = has_kernel(overload, _STRUCTURED) and not has_kernel(overload, "CPU")
    return Plan(Served.TORCH if composed else Served.CPU)


def _kernel_for(overload: Any) -> Kernel | None:
    """The kernel of an overload, or None to leave it to torch or to the fallback."""
    served, lowering, twin = plan(overload)
    if served is Served.BY_HAND:
        return _by_hand[overload.name()]
    if served is Served.CPU:
        # Of a structured operator torch makes `empty` and an out= call, which would hide it from the fallback.
        return _cpu(overload) if has_kernel(overload, _STRUCTURED) else None
    if lowering is None:
        return None
    kernel = _guarded(_recording_kernel(overload, lowering, twin), overload, lowering)
    if overload.name() == "aten::repeat_interleave.Tensor":
        return counted_kernels.with_output_size(kernel)
    for position, argument in enumerate(overload._schema.arguments):
        if argument.name == "indices" and str(argument.type) == "List[Optional[Tensor]]":
            base = overload._schema.name.removeprefix("aten::")
            return counted_kernels.with_plain_indices(base, kernel, position, takes_mask="index_put" in base)
    return kernel


def _recording_kernel(overload: Any, lowering: Lowering, twin: Any) -> Kernel:
    if twin is None:
        return _functional(overload, lowering)
    sig = signature(overload)
    if sig.out:
        return _out(overload, twin, lowering, sig)
    return _with_results(twin, lowering, sig) if gives_results(overload) else _in_place(overload, lowering, sig)


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
    for overload in all_overloads():
        kernel = _kernel_for(overload)
        if kernel is not None:
            aten.impl(overload.name().removeprefix("aten::"), kernel, BACKEND_KEY)
    for composite, function in COMPOSITES.items():
        for key in (AUTOGRAD_KEY, BACKEND_KEY):
            aten.impl(composite, function, key)
    for name, function in {**GRADIENTS, **PACKING}.items():
        aten.impl(name, function, AUTOGRAD_KEY)
    _register_foreign_kernels()
    rest.fallback(run_fallback, BACKEND_KEY)


def run_fallback(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """The boxed fallback: whatever has no kernel at all, custom operators included."""
    return run_on_cpu(overload, args, kwargs)
