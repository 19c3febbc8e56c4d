"""Kernels about a tensor's storage and geometry, written by hand: allocation, views, copies, resizing, reading.

Everything else is recorded from its lowering (see `kernels`). May import: tensor, transfer, recorder's errors.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xlatrainer.backend import counters
from xlatrainer.backend._private_api import alias_as_strided, alias_view, call_composite_kernel, call_meta_kernel
from xlatrainer.backend.ir import Value, make_spec
from xlatrainer.backend.overlap import check_written
from xlatrainer.backend.recorder import check_device, not_on_device
from xlatrainer.backend.state import state
from xlatrainer.backend.strided import Geometry, contiguous_strides, extent
from xlatrainer.backend.tensor import (
    assign,
    broadcast,
    convert,
    empty_tensor,
    new_tensor,
    resized,
    storage_data,
    value_of,
)
from xlatrainer.backend.transfer import read_to_host, upload_value

__all__ = ["kernels", "resize_"]

aten = torch.ops.aten


def _channels_last_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of N, C, spatial dims with the channels innermost."""
    order = (0, *range(2, len(size)), 1)
    inner = contiguous_strides([size[d] for d in order])
    return tuple(inner[order.index(d)] for d in range(len(size)))


_RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _strides(size: tuple[int, ...], memory_format: torch.memory_format | None) -> tuple[int, ...]:
    if memory_format in _RANKS:
        if len(size) != _RANKS[memory_format]:
            name = str(memory_format).removeprefix("torch.")
            raise RuntimeError(f"required rank {_RANKS[memory_format]} tensor to use {name} format")
        return _channels_last_strides(size)
    return contiguous_strides(size)


def _laid_out(shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...]) -> torch.Tensor:
    """A tensor with these strides over a storage of its own, with nothing written to it."""
    if stride == contiguous_strides(shape):
        return empty_tensor(shape, dtype)
    base = empty_tensor((extent(Geometry(shape, stride, 0)),), dtype)
    storage_data(base).viewed = True
    return alias_as_strided(base, shape, stride, 0)


def _refuse_pinned(pin_memory: bool | None) -> None:
    if pin_memory:
        raise RuntimeError("Cannot pin 'xla' memory: only dense CPU tensors can be pinned")


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    _refuse_pinned(pin_memory)
    check_device(device)
    shape = tuple(size)
    if shape and min(shape) < 0:
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(shape)}: {list(shape)}")
    dtype = dtype or torch.get_default_dtype()
    if memory_format is None:
        return empty_tensor(shape, dtype)
    return _laid_out(shape, dtype, _strides(shape, memory_format))


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    _refuse_pinned(pin_memory)
    check_device(device)
    return _laid_out(tuple(size), dtype or torch.get_default_dtype(), tuple(stride))


def new_zeros_with_same_feature_meta(
    self: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """A tangent laid out like its tensor. torch's own asks the storage for its size, which is empty here."""
    shape = tuple(other.shape)
    if self_num_batch_dims:
        return empty_tensor((*self.shape[:self_num_batch_dims], *shape), other.dtype)
    return _laid_out(shape, other.dtype, other.stride())


def _mark_viewed(tensor: torch.Tensor) -> None:
    storage_data(tensor).viewed = True


def as_strided(
    self: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    offset = int(self.storage_offset()) if storage_offset is None else storage_offset
    data = storage_data(self)
    whole = data.spec if data.value is None else data.value.spec
    last = offset  # element that the view reaches: `strided.extent`, inline, since every view of torch's comes by here
    for length, step in zip(size, stride, strict=True):
        last += (length - 1) * step
    itemsize = self.element_size()
    there = whole.numel * whole.dtype.itemsize
    if ((last + 1) * itemsize > there or offset < 0) and 0 not in size:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {itemsize} "
            f"requiring a storage size of {(last + 1) * itemsize} are out of bounds for storage of size {there}"
        )
    data.viewed = True
    return alias_as_strided(self, size, stride, offset)


def as_strided_(
    self: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """In place on the geometry: what `transpose_`, `squeeze_` and others end in."""
    self.data = as_strided(self, size, stride, storage_offset)
    return self


def as_strided_scatter(
    self: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """A copy of the whole storage, since size and stride are about that, written through a view."""
    with state.lock:
        data = storage_data(self)
        flat = empty_tensor(data.spec.shape, self.dtype)
        copied = storage_data(flat)
        copied.value, copied.spec, copied.viewed = data.value, data.spec, True
        result = alias_as_strided(flat, tuple(self.shape), self.stride(), int(self.storage_offset()))
        written = as_strided(result, size, stride, storage_offset)
        if written.shape != src.shape:
            raise RuntimeError(
                "expected src to have a size equal to the slice of self. src size = "
                f"{list(src.shape)}, slice size = {list(written.shape)}"
            )
        copy_(written, src)
        return result


def _geometry_only(overload: Any) -> Callable[..., Any]:
    """A kernel for a view operator that only needs torch's own work on sizes and strides."""

    def kernel(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _mark_viewed(self)
        return call_meta_kernel(overload, self, *args, **kwargs)

    return kernel


def view(self: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    storage_data(self).viewed = True
    return alias_view(self, size)


def view_dtype(self: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    _mark_viewed(self)
    return call_composite_kernel(aten.view.dtype, self, dtype)


def set_storage(
    self: torch.Tensor, source: Any, storage_offset: int = 0, size: Sequence[int] = (), stride: Sequence[int] = ()
) -> torch.Tensor:
    if source.device.type != "xla":
        raise RuntimeError(f"aten::set_: cannot set an xla tensor to a storage on {source.device}")
    source._xla.viewed = True
    return call_meta_kernel(aten.set_.source_Storage_storage_offset, self, source, storage_offset, size, stride)


def clone(self: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    """A clone shares the value, which never changes: nothing is recorded."""
    with state.lock:
        return _copy_of(self, value_of(self), memory_format)


def _copy_of(tensor: torch.Tensor, value: Value, memory_format: torch.memory_format | None) -> torch.Tensor:
    """A tensor that holds `value`, which has the shape of `tensor`, with the strides that torch gives a copy of it."""
    shape = value.spec.shape
    stride = _copy_strides(tensor, memory_format)
    if stride == contiguous_strides(shape):
        return new_tensor(value)
    result = _laid_out(shape, value.spec.dtype, stride)
    assign(result, value)
    return result


def _copy_strides(tensor: torch.Tensor, memory_format: torch.memory_format | None) -> tuple[int, ...]:
    """Those of the source without its gaps where they are asked to be kept, as in torch."""
    if memory_format not in (None, torch.preserve_format):
        return _strides(tuple(tensor.shape), memory_format)
    stride = tensor.stride()
    if stride == contiguous_strides(tensor.shape):
        return stride
    return torch.empty_strided(tensor.shape, stride, device="meta").clone().stride()


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if self.device.type == "xla":
        with state.lock:
            data = storage_data(self)
            if data.viewed:
                check_written("aten::copy_", self, (src,))
            if src.device.type == "xla":
                value = value_of(src)
            elif src.device.type == "cpu":
                value = upload_value(src, data.sharding if src.shape == data.spec.shape else None)
            else:
                raise not_on_device("aten::copy_", "src", src)
            shape = tuple(self.shape)
            if value.spec.shape != shape:
                value = broadcast(value, shape)
            assign(self, value)
        return self
    if src.device.type != "xla" or self.device.type not in ("cpu", "meta"):
        raise not_on_device("aten::copy_", "self", self)
    if self.device.type == "cpu":
        self.copy_(read_to_host([src])[0])
    return self


def to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """What `Tensor.to` ends in. On its way to the CPU a tensor is waited for: there is no pinned memory to copy to."""
    _refuse_pinned(pin_memory)
    check_device(device)
    here, there = self.device.type, "xla" if device is None else device.type
    if layout not in (None, self.layout) or self.layout is not torch.strided or self.is_quantized:
        there = "other"
    if here == "xla" and there == "cpu":
        return _to_host(self, dtype, memory_format)
    if there != "xla" or here not in ("xla", "cpu"):
        options = {"dtype": dtype, "layout": layout, "memory_format": memory_format}
        return call_composite_kernel(aten._to_copy.default, self, device=device, **options)
    with state.lock:
        value = value_of(self) if here == "xla" else upload_value(self)
        return _copy_of(self, convert(value, dtype or self.dtype), memory_format)


def _to_host(self: torch.Tensor, dtype: torch.dtype | None, memory_format: torch.memory_format | None) -> torch.Tensor:
    stride = _copy_strides(self, memory_format)
    copy = read_to_host([self])[0]
    if stride == copy.stride():
        return copy if dtype in (None, copy.dtype) else copy.to(dtype)
    return torch.empty_strided(self.shape, stride, dtype=dtype or self.dtype).copy_(copy)


def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(dst, self, non_blocking)


def local_scalar_dense(self: torch.Tensor) -> Any:
    counters.add("sync::_local_scalar_dense")
    return read_to_host([self])[0].item()


def equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    """Compared on the device, of which one truth value is read."""
    if self.device != other.device:
        raise RuntimeError(
            f"equal: expected tensors of one device, but got {self.device} and {other.device}; move one with .to()"
        )
    if self.shape != other.shape:
        return False
    counters.add("sync::equal")
    return bool(read_to_host([aten.all(aten.eq(self, other))])[0])


def resize_(
    self: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Like torch: the storage grows if it must, what is in it stays; of the same size a tensor keeps its strides."""
    shape = tuple(size)
    if shape == tuple(self.shape) and memory_format in (None, torch.preserve_format):
        return self
    with state.lock:
        data = storage_data(self)
        whole = data.spec if data.value is None else data.value.spec
        offset = int(self.storage_offset())
        needed = math.prod(shape) + offset
        if needed * self.element_size() > whole.numel * whole.dtype.itemsize:
            grown = make_spec((-(-needed * self.element_size() // whole.dtype.itemsize),), whole.dtype, whole.held)
            data.value = None if data.value is None else resized(data.value, grown)
            data.spec = grown
        data.viewed = True
        stride = _strides(shape, memory_format)
        self.data = alias_as_strided(self, shape, stride, offset)
        return self


def set_source_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if source.device.type != "xla":
        raise not_on_device("aten::set_", "source", source)
    _mark_viewed(source)
    self.data = source
    return self


def _is_set_to(self: torch.Tensor, tensor: torch.Tensor) -> bool:
    same = self.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return same and _same_geometry(self, tensor)


def _same_geometry(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and int(a.storage_offset()) == int(b.storage_offset())


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return False


def _lazy_bit(overload: Any) -> Callable[..., Any]:
    """A kernel for a view that only sets a bit on the tensor: reading it looks at the bit."""

    def kernel(self: torch.Tensor) -> Any:
        _mark_viewed(self)
        return call_composite_kernel(overload, self)

    return kernel


def kernels() -> dict[str, Callable[..., Any]]:
    """All kernels of this module by overload."""
    table: dict[str, Callable[..., Any]] = {
        "aten::empty.memory_format": empty,
        "aten::empty_strided": empty_strided,
        "aten::_new_zeros_with_same_feature_meta": new_zeros_with_same_feature_meta,
        "aten::as_strided": as_strided,
        "aten::as_strided_": as_strided_,
        "aten::as_strided_scatter": as_strided_scatter,
        "aten::view": view,
        "aten::_unsafe_view": view,
        "aten::clone": clone,
        "aten::copy_": copy_,
        "aten::_copy_from": _copy_from,
        "aten::_to_copy": to_copy,
        "aten::_local_scalar_dense": local_scalar_dense,
        "aten::equal": equal,
        "aten::resize_": resize_,
        "aten::set_.source_Tensor": set_source_tensor,
        "aten::set_.source_Storage_storage_offset": set_storage,
        "aten::is_set_to": _is_set_to,
        "aten::is_pinned": _is_pinned,
    }
    for name in ("unfold", "view_as_real", "view_as_complex", "_reshape_alias"):
        overload = getattr(aten, name).default
        table[overload.name()] = _geometry_only(overload)
    for name in ("_conj", "_neg_view"):
        overload = getattr(aten, name).default
        table[overload.name()] = _lazy_bit(overload)
    table["aten::view.dtype"] = view_dtype
    return table
