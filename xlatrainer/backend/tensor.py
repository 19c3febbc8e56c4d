"""The torch side of a value: plain `torch.Tensor`s whose storage carries a `StorageData`.

What a tensor holds hangs on its storage, so everything that shares the storage (views, `detach`, `.data`, `Parameter`,
saved tensors) sees the same data and its in-place updates. Tensors are strided as on any device: sizes, strides and
offset are torch's own, and a view that torch makes needs no record of ours. The data is one flat value; reading
through a view records a strided read of it, writing a strided write, both cheap for XLA (see `strided`).

All functions here must be called with `state.lock` held.

May import: ir, placement, state, strided, runtime, precision, dtypes, _private_api.
"""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xlatrainer.backend import counters, runtime
from xlatrainer.backend._private_api import create_tensor
from xlatrainer.backend.dtypes import to_numpy
from xlatrainer.backend.ir import Operation, Spec, Trace, Value, make_spec
from xlatrainer.backend.placement import Home, Sharding, constrained_to
from xlatrainer.backend.precision import refresh_policy
from xlatrainer.backend.state import state
from xlatrainer.backend.strided import Geometry, contiguous_strides, read, write

__all__ = [
    "StorageData",
    "assign",
    "broadcast",
    "constrained",
    "convert",
    "convert_array",
    "empty_tensor",
    "from_host",
    "from_process",
    "new_tensor",
    "regathered",
    "resized",
    "set_sharding",
    "storage_data",
    "unspread",
    "value_of",
]


class StorageData:
    """What a storage holds.

    `value` is the data, in any shape: only the row-major order counts; None while nothing was written. `viewed` is
    false as long as the only geometry that exists for the storage is that of `value`'s own shape, which spares the
    look. `sharding` is how everything that is written to it shall lie; None: in any way.
    """

    __slots__ = ("__weakref__", "sharding", "spec", "value", "viewed")

    def __init__(self, value: Value | None, spec: Spec, viewed: bool = False) -> None:
        self.value = value
        self.spec = spec  # the shape and dtype the storage was made for
        self.viewed = viewed
        self.sharding: Sharding | None = None


def new_tensor(value: Value) -> torch.Tensor:
    """A contiguous tensor with a storage of its own that holds `value`."""
    spec = value.spec
    tensor = create_tensor(spec.shape, spec.dtype)
    tensor.untyped_storage()._xla = StorageData(value, spec)  # type: ignore[attr-defined]
    return tensor


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor with nothing written to it yet; reads as zeros."""
    to_numpy(dtype)  # refuses what XLA does not have
    if not state.trace.num_nodes:
        refresh_policy()
    tensor = create_tensor(shape, dtype)
    tensor.untyped_storage()._xla = StorageData(None, make_spec(shape, dtype))  # type: ignore[attr-defined]
    return tensor


def storage_data(tensor: torch.Tensor) -> StorageData:
    """What the storage of an `xla` tensor holds; raises `AttributeError` for other tensors."""
    return tensor.untyped_storage()._xla  # type: ignore[attr-defined]


def value_of(tensor: torch.Tensor) -> Value:
    """The value of an `xla` tensor, with its shape and dtype."""
    data = storage_data(tensor)
    value = data.value
    if data.viewed or value is None:
        return _through_view(tensor, data)
    return value


def _record(operation: Operation, *operands: Value) -> Value:
    trace = state.trace
    return trace.append((operation, *[trace.slot_of(value) for value in operands]))[0]


def _whole(data: StorageData) -> Value:
    """The flat data, made of zeros at the first look if nothing was written."""
    if data.value is None:
        data.value = _record(_zeros(data.spec))
    return data.value


def _geometry(tensor: torch.Tensor) -> Geometry:
    return Geometry(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _covers(view: Geometry, dtype: torch.dtype, whole: Spec) -> bool:
    """True if the view shows the whole data in its own order."""
    if view.offset or dtype is not whole.dtype:
        return False
    return view.stride == contiguous_strides(view.size) and make_spec(view.size, dtype).numel == whole.numel


def _through_view(tensor: torch.Tensor, data: StorageData) -> Value:
    return _with_bits(tensor, _elements(tensor, data))


def _with_bits(tensor: torch.Tensor, value: Value) -> Value:
    """`value` conjugated and negated as the lazy bits of the tensor say: the same to read and to write."""
    if value.spec.dtype.is_complex and tensor.is_conj():
        value = _record(_bit_operation(value.spec, "conj"), value)
    if tensor.is_neg():
        value = _record(_bit_operation(value.spec, "neg"), value)
    return value


def _elements(tensor: torch.Tensor, data: StorageData) -> Value:
    whole = _whole(data)
    view = _geometry(tensor)
    dtype = tensor.dtype
    if whole.spec.shape == view.size and _covers(view, dtype, whole.spec):
        return whole
    trace: Trace = state.trace
    key = (whole, view, dtype)
    found = trace.views.get(key)
    if found is None:
        found = trace.views[key] = _record(_view_operation(whole.spec, view, dtype), whole)
    return found


def assign(tensor: torch.Tensor, value: Value) -> None:
    """Make `value` (the tensor's shape, any dtype) what the tensor holds, through its view of the storage."""
    if value.spec.dtype is not tensor.dtype:
        value = convert(value, tensor.dtype)
    data = storage_data(tensor)
    if not data.viewed:
        _replace(data, value)
        return
    value = _with_bits(tensor, value)
    view = _geometry(tensor)
    if _covers(view, tensor.dtype, data.spec if data.value is None else data.value.spec):
        _replace(data, value)
        return
    whole = _whole(data)
    _replace(data, _record(_write_operation(whole.spec, value.spec, view), whole, value))
    state.trace.views[(data.value, view, tensor.dtype)] = value


def _replace(data: StorageData, value: Value) -> None:
    """Give the storage a new value; the old one is noted, to return to should the trace fail."""
    old = data.value
    if old is not None and old.buffer is not None:
        state.trace.overwritten.append((weakref.ref(data), old.spec, old.buffer, old.sharding))
    if data.sharding is not None and value.sharding is not data.sharding and data.sharding.home is state.home:
        if value.spec.shape != data.spec.shape:  # written through a view of all of it
            value = resized(value, make_spec(data.spec.shape, value.spec.dtype))
        value = constrained(value, data.sharding)
    data.value = value


def set_sharding(tensor: torch.Tensor, sharding: Sharding | None) -> None:
    """Spread what the tensor holds over the devices so, and if it is all of its storage, everything it will hold.

    What is there already is moved now, without a program. None: what it will hold may lie in any way.
    """
    data = storage_data(tensor)
    shape = tuple(tensor.shape)
    is_whole = shape == data.spec.shape and _covers(_geometry(tensor), tensor.dtype, data.spec)
    if is_whole:
        data.sharding = sharding
    if sharding is None:
        return
    value = _whole(data) if is_whole else value_of(tensor)
    if value.sharding is sharding and value.spec.shape == shape:
        return
    if is_whole and value.spec.shape == shape and isinstance(value.buffer, jax.Array):
        counters.add("Reshard")
        placed = Value(value.spec, runtime.moved(value.buffer, sharding.jax))
        placed.sharding = sharding
        data.value = placed
    else:
        assign(tensor, constrained(value, sharding))


def unspread(tensor: torch.Tensor) -> None:
    """Bring what the storage of a tensor holds to the one device, and let it lie as it likes from now on."""
    data = storage_data(tensor)
    data.sharding = None
    value = data.value
    if value is not None and value.sharding is not None and isinstance(value.buffer, jax.Array):
        counters.add("Reshard")
        data.value = Value(value.spec, runtime.moved(value.buffer, None))


def constrained(value: Value, sharding: Sharding) -> Value:
    """`value` spread over the devices so; a pending one will be, once it is computed."""
    made = _record(_constraint(value.spec, sharding), value)
    made.sharding = sharding
    return made


def convert(value: Value, dtype: torch.dtype) -> Value:
    """`value` in another dtype, by torch's rules for `Tensor.to`."""
    if value.spec.dtype is dtype:
        return value
    return _record(_convert_operation(value.spec, dtype), value)


def broadcast(value: Value, shape: tuple[int, ...]) -> Value:
    """`value` expanded to `shape`; raises `RuntimeError`, as torch does, where that cannot be."""
    try:
        fits = torch.broadcast_shapes(value.spec.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise RuntimeError(
            f"output with shape {list(shape)} doesn't match the broadcast shape of a source with shape "
            f"{list(value.spec.shape)}"
        )
    return _record(_broadcast_operation(value.spec, shape), value)


def resized(value: Value, spec: Spec) -> Value:
    """The flat data of `value`, cut or padded with zeros to `spec`."""
    return _record(_resize_operation(value.spec, spec), value)


def from_host(tensor: torch.Tensor, sharding: Sharding | None = None) -> Value:
    """A copy of a CPU tensor on the device; on several, spread as `sharding` says, by default whole on each."""
    refresh_policy()
    if sharding is None and state.home is not None:
        sharding = state.home.replicated
    spec = make_spec(tuple(tensor.shape), tensor.dtype)
    value = Value(spec, runtime.to_device(tensor, spec.held, None if sharding is None else sharding.jax))
    value.sharding = sharding
    if state.observer is not None:
        state.observer.uploaded(tensor, value)
    return value


def from_process(tensor: torch.Tensor, shape: tuple[int, ...], sharding: Sharding) -> Value:
    """A value of `shape` of which each process gives its part in a CPU tensor."""
    spec = make_spec(shape, tensor.dtype)
    value = Value(spec, runtime.from_process(tensor.to(spec.held), shape, sharding.jax))
    value.sharding = sharding
    return value


# The operations behind the above, made once for each set of specs. They keep the caches, not the values.

_operations: dict[Any, Operation] = {}


def _cached(key: tuple[Any, ...], make: Any) -> Operation:
    found = _operations.get(key)
    if found is None:
        found = _operations[key] = make()
        found.identity = repr(key)
    return found


def _zeros(spec: Spec) -> Operation:
    def lower(_operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
        return (jnp.zeros(spec.shape, to_numpy(spec.dtype)),)

    return _cached(("zeros", spec), lambda: Operation("xla::zeros", lower, (spec,)))


def convert_array(array: Any, dtype: torch.dtype) -> Any:
    """`array` in another dtype; complex to real drops the imaginary part, anything to bool compares with zero."""
    target = to_numpy(dtype)
    if dtype is torch.bool:
        return array != 0
    if jnp.iscomplexobj(array) and not dtype.is_complex:
        array = jnp.real(array)
    return jax.lax.convert_element_type(array, target)


def _convert_operation(spec: Spec, dtype: torch.dtype) -> Operation:
    def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
        return (convert_array(operands[0], dtype),)

    out = make_spec(spec.shape, dtype)
    return _cached(("convert", spec, out), lambda: Operation("xla::convert", lower, (out,)))


def _constraint(spec: Spec, sharding: Sharding) -> Operation:
    def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
        return (constrained_to(operands[0], sharding),)

    key = ("mark_sharding", spec, sharding)
    return _cached(
        key, lambda: Operation("xla::mark_sharding", lower, (spec,), detail=sharding.text, sharding=sharding)
    )


def regathered(value: Value, home: Home) -> Value:
    """`value` whole on each device, by a transfer of its own: XLA does not take the one before in its place."""

    def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
        return (constrained_to(jax.lax.optimization_barrier(operands[0]), home.replicated),)

    key = ("regather", value.spec, home.replicated)
    made = _cached(key, lambda: Operation("xla::regather", lower, (value.spec,), sharding=home.replicated))
    return _record(made, value)


def _bit_operation(spec: Spec, bit: str) -> Operation:
    def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
        return (jnp.conj(operands[0]) if bit == "conj" else -operands[0],)

    return _cached((bit, spec), lambda: Operation(f"xla::{bit}", lower, (spec,)))


def _broadcast_operation(spec: Spec, shape: tuple[int, ...]) -> Operation:
    def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
        extra = operands[0].ndim - len(shape)  # leading dims of size 1 may go, as in copy_
        array = operands[0].reshape(operands[0].shape[extra:]) if extra > 0 else operands[0]
        return (jnp.broadcast_to(array, shape),)

    out = make_spec(shape, spec.dtype, spec.held)
    return _cached(("broadcast", spec, shape), lambda: Operation("xla::broadcast", lower, (out,)))


def _resize_operation(spec: Spec, out: Spec) -> Operation:
    def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
        flat = operands[0].reshape(-1)
        return (jnp.pad(flat[: out.numel], (0, max(out.numel - flat.size, 0))).reshape(out.shape),)

    return _cached(("resize", spec, out), lambda: Operation("xla::resize", lower, (out,)))


def _widened(array: Any, dtype: torch.dtype) -> Any:
    """`array`, which may be held in another dtype, in the dtype of its tensor."""
    return jax.lax.convert_element_type(array, to_numpy(dtype))


def _bits(array: Any, dtype: torch.dtype) -> Any:
    """The same bytes as flat elements of another dtype; `array` has the dtype of its tensor."""
    target = to_numpy(dtype)
    flat = array.reshape(-1)
    if flat.dtype == target:
        return flat
    if jnp.iscomplexobj(flat):
        flat = jnp.stack([flat.real, flat.imag], axis=-1).reshape(-1)
    if dtype.is_complex:
        parts = _bits(flat, torch.float32 if dtype is torch.complex64 else torch.float64).reshape(-1, 2)
        return jax.lax.complex(parts[:, 0], parts[:, 1])
    if flat.dtype == jnp.bool_:
        flat = flat.astype(jnp.uint8)
    if target == jnp.bool_:
        return _bits(flat, torch.uint8) != 0
    ratio = target.itemsize // flat.dtype.itemsize
    if ratio > 1:
        flat = flat[: flat.size // ratio * ratio].reshape(-1, ratio)
    return jax.lax.bitcast_convert_type(flat, target).reshape(-1)


def _view_operation(spec: Spec, view: Geometry, dtype: torch.dtype) -> Operation:
    def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
        data = operands[0] if spec.dtype is dtype else _bits(_widened(operands[0], spec.dtype), dtype)
        return (read(data, view),)

    out = make_spec(view.size, dtype, spec.held if spec.dtype is dtype else None)
    detail = f"size={view.size}, stride={view.stride}, offset={view.offset}"
    return _cached(("view", spec, view, out), lambda: Operation("xla::view", lower, (out,), detail=detail))


def _write_operation(spec: Spec, value: Spec, view: Geometry) -> Operation:
    def lower(operands: Any, _floats: Any, _ints: Any, _key: Any) -> tuple[Any, ...]:
        data, update = operands
        if spec.dtype is value.dtype:
            return (write(data, _widened(update, spec.held), view),)
        flat = write(_bits(_widened(data, spec.dtype), value.dtype), _widened(update, value.dtype), view)
        return (_bits(flat, spec.dtype).reshape(spec.shape),)

    detail = f"size={view.size}, stride={view.stride}, offset={view.offset}"
    return _cached(("write", spec, value, view), lambda: Operation("xla::write", lower, (spec,), detail=detail))
