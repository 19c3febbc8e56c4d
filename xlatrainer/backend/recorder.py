"""Records calls of operators that have a lowering: one `Recorder` for each overload.

A call is scanned once. Tensors become slots of the trace; Python numbers that the operator computes with are lifted
into the trace's inputs; what is left, with the specs of the tensors, is the key under which the `Operation` is found
that was built when the operator was called like this for the first time. Only then are shapes inferred and the
lowering bound.

All calls must be made with `state.lock` held.

May import: ir, state, tensor, shapes, cpu_errors, lowerings.registry, schema, precision, dtypes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xlatrainer.backend.argument_checks import number_check
from xlatrainer.backend.cpu_errors import infer_or_refuse
from xlatrainer.backend.dtypes import Policy, number_dtype, opmath, policy, to_numpy
from xlatrainer.backend.ir import Operation, Spec, Value, make_spec
from xlatrainer.backend.lowerings.registry import Lowering, Number
from xlatrainer.backend.precision import refresh_policy
from xlatrainer.backend.schema import argument_names, by_name, lifted_positions, plain_positions
from xlatrainer.backend.shapes import as_meta
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import convert_array, storage_data, value_of
from xlatrainer.errors import LoweringError

__all__ = ["Recorder", "check_device", "not_on_device"]


# Under a precision policy these take half types as they are held; all others compute them in float32.
_NARROW = frozenset({"xlatrainer::recurrent_layer", "xlatrainer::recurrent_layer_backward"}) | frozenset(
    f"aten::{name}"
    for name in (
        "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "addbmm", "baddbmm", "addr",
        "convolution", "convolution_backward", "convolution_overrideable", "convolution_backward_overrideable",
    )
)  # fmt: skip


class _TensorSlot(NamedTuple):
    """Stands for an operand in the template of a call."""

    number: int


class _NumberSlot(NamedTuple):
    """Stands for a lifted Python number: its `position` among floats or ints, `imaginary` a complex one's second.

    `dtype` is None for a Python number, else that of the 0-dim CPU tensor that it came from.
    """

    kind: type
    position: int
    imaginary: int = -1
    dtype: torch.dtype | None = None


class _Call(NamedTuple):
    """An operation and the structure of its results: None for one tensor, else one entry each, False for a None.

    `check` is called with the lifted numbers of each call, if they can be wrong.
    """

    operation: Operation
    structure: tuple[Any, ...] | None
    check: Callable[[Sequence[float]], None] | None


_Parameter = torch.nn.Parameter
_default_dtype = torch.get_default_dtype
_Tensor = torch.Tensor


def not_on_device(operator: str, argument: str, tensor: torch.Tensor) -> RuntimeError:
    """The error for a tensor of another device among `xla` tensors."""
    return RuntimeError(
        f"Input tensor is not an XLA tensor: {tensor.type()}. Expected all tensors to be on the same device: argument "
        f"'{argument}' of {operator} is on {tensor.device} with shape {tuple(tensor.shape)}, others are on xla:0. "
        f"Move it with `.to('xla')`"
    )


def check_device(device: Any) -> None:
    """Raise for a device that this process does not have."""
    if isinstance(device, torch.device) and device.type == "xla" and device.index not in (None, 0):
        raise IndexError(f"there is no device {device}: a process has one torch device, xla:0")


class Recorder:
    """Records calls of one overload with one lowering.

    Args:
        overload: the overload that is called, functional or in-place; its meta kernel gives shapes and errors.
        lowering: the lowering of the overload, or of its functional twin.
        written: for an in-place overload, the names of the tensors that take the results.
    """

    def __init__(self, overload: Any, lowering: Lowering, written: tuple[str, ...] = ()) -> None:
        self.overload = overload
        self.name = overload.name()
        self.lowering = lowering
        self.written = written
        self.names = argument_names(overload)
        self.lifted = lifted_positions(overload, lowering.static)
        self.plain = plain_positions(overload)
        self.calls: dict[tuple[Any, ...], _Call] = {}
        self.updated = [(self.names.index(name), name) for name in lowering.mutates]
        self.saw_view = False  # in the last call, among the tensors that were arguments by position

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Value], Any]:
        """Record a call; returns its values and the structure of the results (see `_Call`)."""
        trace = state.trace
        if not trace.num_nodes:
            refresh_policy()
        slots: list[Any] = [None]
        key: list[Any] = [_default_dtype(), policy().name]
        numbers: list[Any] = []
        self.saw_view = False
        plain = self.plain
        for position, arg in enumerate(args):
            kind = arg.__class__
            if kind is _Tensor or kind is _Parameter:
                try:
                    data = arg.untyped_storage()._xla
                except AttributeError:
                    self._scan_number(arg, position, key, numbers)
                    continue
                value = data.value
                if data.viewed or value is None:
                    self.saw_view = True
                    value = value_of(arg)
                slots.append(value.slot if value.trace is trace else trace.slot_of(value))
                key.append(value.spec)
            elif arg is None:
                key.append(None)
            elif position in plain:
                key.append(tuple(arg) if kind is list else arg)
            elif kind is float and position in self.lifted:
                numbers.append(arg)
                key.append(float)
            else:
                self._scan(arg, position, slots, key, numbers)
        if kwargs:
            for name, arg in kwargs.items():
                key.append(name)
                self._scan(arg, name, slots, key, numbers)
        token = tuple(key)
        call = self.calls.get(token)
        if call is None:
            call = self.calls[token] = self._build(args, kwargs, key)
        if numbers:
            if call.check is not None:
                call.check(numbers)
            for number in numbers:
                (trace.ints if number.__class__ is int else trace.floats).append(number)
        slots[0] = call.operation
        return trace.append(tuple(slots)), call.structure

    def _scan(self, arg: Any, where: int | str, slots: list[Any], key: list[Any], numbers: list[Any]) -> None:
        """Append what one argument is to the slots, the key and the lifted numbers."""
        kind = arg.__class__
        if kind is float or kind is int or kind is complex:
            if where in self.lifted and not (kind is int and not -(2**63) <= arg < 2**63):
                key.append(kind)
                if kind is complex:
                    numbers += (arg.real, arg.imag)
                else:
                    numbers.append(arg)
            else:
                key.append((kind, arg))
        elif kind is list or kind is tuple:
            key.append(len(arg))
            for item in arg:
                if item.__class__ is _Tensor or item.__class__ is _Parameter:
                    self._scan_tensor(item, where, slots, key, numbers)
                else:
                    self._scan(item, where, slots, key, numbers)
        elif isinstance(arg, _Tensor):
            self._scan_tensor(arg, where, slots, key, numbers)
        elif kind is torch.Generator:
            raise RuntimeError(
                f"Expected a 'xla' device type for generator but found '{arg.device.type}' ({self.name}): the "
                "device has one stream of random numbers, seeded by `torch.manual_seed` or `xla.manual_seed`; draw on "
                "the CPU and move the result to use a generator of your own"
            )
        else:
            key.append((kind, arg))

    def _scan_tensor(
        self, arg: torch.Tensor, where: int | str, slots: list[Any], key: list[Any], numbers: list[Any]
    ) -> None:
        try:
            data = storage_data(arg)
        except AttributeError:
            self._scan_number(arg, where, key, numbers)
            return
        value = data.value
        if data.viewed or value is None:
            value = value_of(arg)
        trace = state.trace
        slots.append(value.slot if value.trace is trace else trace.slot_of(value))
        key.append(value.spec)

    def _scan_number(self, arg: torch.Tensor, where: int | str, key: list[Any], numbers: list[Any]) -> None:
        """Of tensors that are not on the device only those of the CPU without dimensions are taken, as numbers."""
        if not arg.is_cpu or arg.dim():
            name = self.names[where] if isinstance(where, int) else where
            raise not_on_device(self.name, name, arg)
        number = arg.item()
        key.append(("0-dim", arg.dtype))
        if number.__class__ is complex:
            numbers += (number.real, number.imag)
        else:
            numbers.append(int(number) if number.__class__ is bool else number)

    # What follows runs once for each new key.

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: list[Any]) -> _Call:
        check_device(kwargs.get("device"))
        template = _Template(self.lifted, policy(), self.name in _NARROW)
        bound_args = tuple(template.bind(arg, position) for position, arg in enumerate(args))
        bound_kwargs = {name: template.bind(arg, name) for name, arg in kwargs.items()}
        meta_args = tuple(as_meta(arg) for arg in args)
        meta_kwargs = {name: as_meta(arg) for name, arg in kwargs.items()}
        result = infer_or_refuse(self.overload, meta_args, meta_kwargs)
        if self.written:
            named = by_name(self.names, meta_args, meta_kwargs)
            result = _specs_of([named[name] for name in self.written])
        structure = None if isinstance(result, Spec) else _structure(result)
        outputs = list(_flatten(result))
        for position, name in self.updated:
            tensor = meta_args[position] if position < len(meta_args) else meta_kwargs.get(name)
            if isinstance(tensor, _Tensor):
                outputs.append(make_spec(tuple(tensor.shape), tensor.dtype))
        specs = tuple(outputs)
        lower = _Lower(self.name, self.lowering, bound_args, bound_kwargs, specs, template, cast=bool(self.written))
        operation = Operation(
            self.name,
            lower,
            specs,
            num_floats=template.num_floats,
            num_ints=template.num_ints,
            random=self.lowering.random,
            detail=_detail(bound_args, bound_kwargs),
            identity=repr((self.written, key)),
        )
        return _Call(operation, structure, self._number_check(specs, args, kwargs))

    def _number_check(self, specs: tuple[Spec, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `_Call.check` is for these arguments."""
        if not specs:
            return None
        given = by_name(self.names, args, kwargs)
        numbers = {name: arg for name, arg in given.items() if arg.__class__ in (int, float)}
        return number_check(self.overload, specs[0].dtype, numbers, self.lifted)


class _Template:
    """Replaces tensors and lifted numbers of a call by slots, in the order in which a call is scanned.

    Under a precision policy, dtypes are those in which the operator is computed.
    """

    def __init__(self, lifted: frozenset[int | str], policy: Policy, narrow: bool) -> None:
        self.lifted = lifted
        self.policy = policy
        self.narrow = narrow
        self.operands: list[np.dtype[Any]] = []
        self.num_floats = 0
        self.num_ints = 0

    def bind(self, arg: Any, where: int | str) -> Any:
        if isinstance(arg, _Tensor):
            if arg.device.type == "xla":
                self.operands.append(to_numpy(self.computed(arg.dtype)))
                return _TensorSlot(len(self.operands) - 1)
            return self._number(arg.item(), self.computed(arg.dtype))
        if isinstance(arg, torch.dtype):
            return self.computed(arg)
        if isinstance(arg, list | tuple):
            return [self.bind(item, where) for item in arg]
        lifts = where in self.lifted and arg.__class__ in (float, int, complex)
        if lifts and not (arg.__class__ is int and not -(2**63) <= arg < 2**63):
            return self._number(arg, None)
        return arg

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        return self.policy.computed(dtype, narrow=self.narrow)

    def _number(self, number: Any, dtype: torch.dtype | None) -> _NumberSlot:
        kind = int if isinstance(number, bool | int) else type(number)
        if kind is int:
            self.num_ints += 1
            return _NumberSlot(int, self.num_ints - 1, dtype=dtype)
        self.num_floats += 2 if kind is complex else 1
        last = self.num_floats - 1
        return _NumberSlot(complex, last - 1, last, dtype) if kind is complex else _NumberSlot(float, last, dtype=dtype)


class _Lower:
    """Calls the lowering with the operands of one node; see `Operation.lower`."""

    def __init__(
        self,
        name: str,
        lowering: Lowering,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        specs: tuple[Spec, ...],
        template: _Template,
        *,
        cast: bool,
    ) -> None:
        self.name = name
        self.lowering = lowering
        self.args = args
        self.kwargs = kwargs
        dtypes = [template.computed(spec.dtype) for spec in specs]
        specs = tuple(make_spec(spec.shape, dtype, dtype) for spec, dtype in zip(specs, dtypes, strict=True))
        self.specs = specs
        self.operands = template.operands
        self.cast = cast or bool(template.policy.name)  # mixed dtypes come together in what torch says
        floating = [spec.dtype for spec in specs if spec.dtype.is_floating_point or spec.dtype.is_complex]
        self.number_dtype = to_numpy(opmath(floating[0])) if floating else None

    def __call__(self, operands: Sequence[Any], floats: Any, ints: Any, key: Any) -> tuple[Any, ...]:
        operands = [array.astype(dtype) for array, dtype in zip(operands, self.operands, strict=True)]
        kwargs = {name: self._resolve(arg, operands, floats, ints) for name, arg in self.kwargs.items()}
        if self.lowering.random:
            kwargs["key"] = key
        if self.lowering.takes_specs:
            kwargs["out_specs"] = self.specs
        args = [self._resolve(arg, operands, floats, ints) for arg in self.args]
        results = tuple(_flatten(self.lowering.function(*args, **kwargs)))
        return tuple(self._checked(results))

    def _resolve(self, arg: Any, operands: Sequence[Any], floats: Any, ints: Any) -> Any:
        kind = arg.__class__
        if kind is _TensorSlot:
            return operands[arg.number]
        if kind is _NumberSlot:
            return self._number(arg, floats, ints)
        if kind is list:
            return [self._resolve(item, operands, floats, ints) for item in arg]
        return arg

    def _number(self, slot: _NumberSlot, floats: Any, ints: Any) -> Any:
        array = ints[slot.position] if slot.kind is int else floats[slot.position]
        if slot.kind is complex:
            array = jax.lax.complex(array, floats[slot.imaginary])
        if slot.dtype is not None:  # a 0-dim tensor: an operand like others
            return convert_array(array, slot.dtype)
        if self.lowering.takes_specs:
            return Number(array, number_dtype(slot.kind))
        if slot.kind is float and self.number_dtype is not None:
            return jax.lax.convert_element_type(array, self.number_dtype)
        return array

    def _checked(self, results: tuple[Any, ...]) -> list[Any]:
        if len(results) != len(self.specs):
            raise LoweringError(f"the lowering of {self.name} gave {len(results)} results, torch has {len(self.specs)}")
        checked = []
        for result, spec in zip(results, self.specs, strict=True):
            array = jnp.asarray(result)
            if self.cast and array.dtype != to_numpy(spec.dtype):
                array = convert_array(array, spec.dtype)
            if array.shape != spec.shape or array.dtype != to_numpy(spec.dtype):
                raise LoweringError(
                    f"the lowering of {self.name} gave {array.dtype}{list(array.shape)}, torch says {spec}; "
                    "it is wrong for these arguments (see CONTRIBUTING.md, 'Add an operator')"
                )
            checked.append(array)
        return checked


def _specs_of(written: list[Any]) -> Any:
    """Specs of the arguments that an in-place operator writes: tensors, or one list of them (foreach)."""
    specs = [
        tuple(make_spec(tuple(t.shape), t.dtype) for t in item)
        if isinstance(item, list)
        else make_spec(tuple(item.shape), item.dtype)
        for item in written
    ]
    return specs[0] if len(specs) == 1 else tuple(specs)


def _flatten(result: Any) -> Any:
    if isinstance(result, list | tuple):
        for item in result:
            yield from _flatten(item)
    elif result is not None:
        yield result


def _structure(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_structure(item) for item in result)
    return result is not None


def _detail(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def text(arg: Any) -> str:
        if isinstance(arg, _TensorSlot):
            return "."
        if isinstance(arg, _NumberSlot):
            return arg.kind.__name__
        if isinstance(arg, list):
            return "[" + ", ".join(map(text, arg)) + "]"
        return str(arg)

    parts = [text(arg) for arg in args] + [f"{name}={text(arg)}" for name, arg in kwargs.items()]
    return ", ".join(parts) if any(part != "." for part in parts) else ""
