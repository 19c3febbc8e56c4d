"""Copies between the device and the host, and the question whether a value is there yet.

May import: tensor, executor, placement, runtime, execution_time, state, source.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from xlatrainer import config
from xlatrainer.backend import execution_time, runtime
from xlatrainer.backend.executor import Lost, raise_failed_checks, run_pending
from xlatrainer.backend.ir import Value, make_spec
from xlatrainer.backend.placement import Sharding
from xlatrainer.backend.source import user_line
from xlatrainer.backend.state import state
from xlatrainer.backend.tensor import from_host, new_tensor, storage_data, value_of
from xlatrainer.errors import ExecutionError

__all__ = [
    "Part",
    "copies_of",
    "fetch",
    "hold",
    "hold_parts",
    "is_ready",
    "read_to_host",
    "upload_value",
    "uploaded",
    "values_to_host",
]


def upload_value(tensor: torch.Tensor, sharding: Sharding | None = None) -> Value:
    """The contents of a CPU tensor as a value on the device, on several devices spread as `sharding` says.

    A loop without any barrier would record for ever. A copy to the device is where a step usually begins: when much is
    pending, it runs first, at the same place of every step.
    """
    with state.lock:
        if state.trace.num_nodes > config.get("max_pending_nodes"):
            run_pending("much is pending and a tensor is copied to the device")
        return from_host(tensor, sharding)


def uploaded(tensor: torch.Tensor, sharding: Sharding | None = None) -> torch.Tensor:
    """A copy of a CPU tensor on the device, as `tensor.to("xla")` makes it, from any thread.

    Nothing is recorded or run, and a step that is being observed on another thread does not see it: what a loader does
    in the background is no part of the step that happens to be recorded meanwhile. Strides are those of `tensor` if it
    is dense; a tensor that requires a gradient gives a leaf that requires one. With `sharding`, each device gets its
    part alone, and strides are those of a contiguous tensor.

    Raises:
        ForkedProcessError: In a forked child.
        RuntimeError: For a sparse or quantized tensor.
    """
    with state.lock:  # says so in a forked child
        pass
    home = state.home
    order = None if sharding is not None else _order_in_memory(tensor)
    if sharding is None and home is not None:
        sharding = home.replicated
    source = tensor if order is None else tensor.permute(order)
    spec = make_spec(tuple(source.shape), source.dtype)
    # without the lock: a training goes on meanwhile
    value = Value(spec, runtime.to_device(source, spec.held, None if sharding is None else sharding.jax))
    value.sharding = sharding
    with state.lock:
        result = new_tensor(value)
        if order is not None:
            result = result.permute([order.index(dim) for dim in range(len(order))])
    return result.requires_grad_() if tensor.requires_grad else result


def _order_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Of a dense tensor whose dimensions are in another order in memory: that order, which torch keeps when it copies.

    None for all others: their copies are contiguous.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def read_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """CPU copies, contiguous, of `xla` tensors; runs what is pending, once, and waits."""
    with state.lock:
        if state.observer is not None and tensors:
            state.observer.broken("it reads a value", user_line())
        values = [_whole(tensor) or value_of(tensor) for tensor in tensors]
    return [copy.view(tensor.shape) for copy, tensor in zip(values_to_host(values), tensors, strict=True)]


def _whole(tensor: torch.Tensor) -> Value | None:
    """The value of the storage, in whatever shape, of a tensor that is all of it in order; None for others."""
    value = storage_data(tensor).value
    if value is None or value.spec.dtype is not tensor.dtype or value.spec.numel != tensor.numel():
        return None
    plain = tensor.is_contiguous() and not tensor.storage_offset() and not tensor.is_conj() and not tensor.is_neg()
    return value if plain else None


def values_to_host(values: Sequence[Value]) -> list[torch.Tensor]:
    """CPU copies of values; runs what is pending if they need it, and waits."""
    with state.lock:
        if any(value.buffer is None for value in values):
            run_pending("a value is read")
    copies = copies_of(values)
    with state.lock:
        raise_failed_checks()  # of the program that computed them, which is done, and of those before
    return copies


def copies_of(values: Sequence[Value]) -> list[torch.Tensor]:
    """CPU copies of values whose program was started; waits for it, and leaves its failed checks to others."""
    copies = []
    for value in values:
        if isinstance(value.buffer, Lost):
            raise value.buffer.error()
        try:
            with execution_time.waiting():
                copy = runtime.to_host(value.buffer)
            copies.append(copy.to(value.spec.dtype))
        except jax.errors.JaxRuntimeError as error:
            raise ExecutionError(f"the program that computes this tensor failed: {error}") from error
    return copies


def fetch(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """CPU copies of tensors of any device, detached: one execution at most for all `xla` tensors among them."""
    on_xla = [tensor.detach() for tensor in tensors if tensor.device.type == "xla"]
    copies = iter(read_to_host(on_xla))
    return [next(copies) if tensor.device.type == "xla" else tensor.detach().cpu() for tensor in tensors]


def hold(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Keep what the tensors hold now, whatever later steps write into them; waits for nothing.

    `xla` tensors are copied on the device: their memory is given to the next step's program.

    Returns:
        A function that gives CPU copies, detached, as `fetch` would have. It may be called from any thread, once.
    """
    on_xla = [tensor.device.type == "xla" for tensor in tensors]
    with state.lock:
        if state.observer is not None and any(on_xla):
            state.observer.interrupted("it keeps a value", user_line())
        values = [value_of(t.detach()) for t, is_xla in zip(tensors, on_xla, strict=True) if is_xla]
        if any(value.buffer is None for value in values):
            run_pending("a copy is kept")
        buffers = [value.buffer for value in values]
    for buffer in buffers:
        if isinstance(buffer, Lost):
            raise buffer.error()
    dtypes = [value.spec.dtype for value in values]
    copies = runtime.copies(buffers)
    others = [t.detach().to("cpu", copy=True) for t, is_xla in zip(tensors, on_xla, strict=True) if not is_xla]

    def fetched() -> list[torch.Tensor]:
        try:
            from_xla = iter([runtime.to_host(copy).to(dtype) for copy, dtype in zip(copies, dtypes, strict=True)])
        except jax.errors.JaxRuntimeError as error:
            raise ExecutionError(f"the program that computes a tensor to be saved failed: {error}") from error
        copies.clear()
        with state.lock:
            raise_failed_checks()  # of the program that computed them, which is done, and of those before
        from_cpu = iter(others)
        return [next(from_xla) if is_xla else next(from_cpu) for is_xla in on_xla]

    return fetched


@dataclass(frozen=True)
class Part:
    """A box out of a tensor.

    Attributes:
        offsets: Where it begins, in each dimension.
        tensor: What is in it, on the CPU.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor


def hold_parts(
    tensors: Sequence[torch.Tensor], owns: Callable[[Any], bool], *, is_first: bool
) -> Callable[[], list[list[Part]]]:
    """As `hold`, of each tensor only the parts that this process is to save. Nothing is gathered.

    Over all processes each element of a tensor is in one part: what several devices have is the first one's. Tensors
    that every process has for itself, on the CPU or on devices of its own alone, are the first process's.

    Args:
        tensors: On any device.
        owns: Whether a JAX device is this process's.
        is_first: Whether this process is the first one.

    Returns:
        A function that gives the parts of each tensor, none for some. It may be called from any thread, once.
    """
    with state.lock:
        if state.observer is not None and any(tensor.device.type == "xla" for tensor in tensors):
            state.observer.interrupted("it keeps a value", user_line())
        values = {i: value_of(t.detach()) for i, t in enumerate(tensors) if t.device.type == "xla"}
        if any(value.buffer is None for value in values.values()):
            run_pending("a copy is kept")
        buffers = {i: value.buffer for i, value in values.items()}
    places: list[tuple[int, tuple[int, ...]]] = []
    pieces = []
    for i, buffer in buffers.items():
        if isinstance(buffer, Lost):
            raise buffer.error()
        if not is_first and all(owns(device) for device in buffer.sharding.device_set):
            continue
        for shard in buffer.addressable_shards:
            if shard.replica_id == 0 and owns(shard.device):
                places.append((i, tuple(part.start or 0 for part in shard.index)))
                pieces.append(shard.data)
    copies = runtime.copies(pieces)
    count, dtypes = len(tensors), [values[i].spec.dtype for i, _ in places]
    others = {i: t.detach().to("cpu", copy=True) for i, t in enumerate(tensors) if is_first and i not in values}

    def fetched() -> list[list[Part]]:
        found: list[list[Part]] = [[] for _ in range(count)]
        for i, tensor in others.items():
            found[i].append(Part((0,) * tensor.dim(), tensor))
        try:
            for (i, offsets), dtype, copy in zip(places, dtypes, copies, strict=True):
                found[i].append(Part(offsets, runtime.to_host(copy).to(dtype)))
        except jax.errors.JaxRuntimeError as error:
            raise ExecutionError(f"the program that computes a tensor to be saved failed: {error}") from error
        copies.clear()
        with state.lock:
            raise_failed_checks()
        return found

    return fetched


def is_ready(tensor: torch.Tensor) -> bool:
    """True if reading the tensor now would neither run nor wait for anything."""
    if tensor.device.type != "xla":
        return True
    data = storage_data(tensor)
    if data.value is None or data.value.buffer is None:
        return False
    buffer = data.value.buffer
    return isinstance(buffer, Lost) or bool(buffer.is_ready())
