"""The XLA platform behind the device: JAX devices, host copies, random keys. Knows nothing of tensors' records.

JAX is asked for its devices at the first use, never at import. 64-bit types are switched on around our own work only.

May import: jax, torch, numpy, host_memory, dtypes, config, counters, measurements, _private_api.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils

from xlatrainer import config
from xlatrainer.backend import counters, measurements, processes
from xlatrainer.backend._private_api import put_on_device
from xlatrainer.backend.dtypes import from_numpy, to_numpy
from xlatrainer.backend.host_memory import keep_freed_memory

__all__ = [
    "compiler_options",
    "copies",
    "default_device",
    "is_device_chosen",
    "from_process",
    "global_devices",
    "local_devices",
    "moved",
    "to_device",
    "to_host",
    "undisturbed",
    "x64",
]

_PLATFORMS = {"": None, "CPU": "cpu", "GPU": "gpu", "CUDA": "gpu", "TPU": "tpu"}


def x64() -> Any:
    """Context in which JAX keeps 64-bit types; the process's own setting is untouched outside of it."""
    return jax.enable_x64(True)


def local_devices() -> list[Any]:
    """The JAX devices of this process on the platform in use, in JAX's order."""
    name = str(config.get("platform"))
    if name.upper() not in _PLATFORMS:
        accepted = ", ".join(repr(p) for p in _PLATFORMS if p)
        raise ValueError(
            f"PJRT_DEVICE={name!r}: not a platform; accepted are {accepted}, or nothing for the best there is"
        )
    _make_cpu_devices()
    processes.join()
    return jax.local_devices(backend=_PLATFORMS[name.upper()])


def global_devices() -> list[Any]:
    """The JAX devices of all processes on the platform in use, in JAX's order."""
    return jax.devices(local_devices()[0].platform)


@cache
def _make_cpu_devices() -> None:
    """Have XLA make as many CPU devices as the settings ask for, which can be said before it makes the first only."""
    wanted = int(config.get("cpu_devices"))
    if wanted < 1:
        raise ValueError(f"CPU_NUM_DEVICES={wanted}: it must be 1 or more")
    if wanted == 1:
        return
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        there = len(jax.local_devices(backend="cpu"))
        if there != wanted:
            raise RuntimeError(
                f"CPU_NUM_DEVICES={wanted}, but this process's XLA has made {there} CPU device(s) already: set it "
                f"before the first use of jax or of the xla device"
            ) from None


class _Chosen:
    device: Any = None


def default_device() -> Any:
    """The JAX device that `xla:0` stands for; chosen at the first call."""
    if _Chosen.device is None:
        keep_freed_memory()
        _Chosen.device = local_devices()[0]
    return _Chosen.device


def is_device_chosen() -> bool:
    """Whether anybody has used the device yet."""
    return _Chosen.device is not None


def num_live_arrays() -> int:
    """How many arrays there are on the device, those of other users of JAX in this process included."""
    return len(jax.live_arrays(default_device().platform))


_BITS = {1: torch.int8, 2: torch.int16}
_ALIGNMENT = 64  # bytes; what XLA's CPU client asks of memory that it does not copy


def to_device(tensor: torch.Tensor, dtype: torch.dtype | None = None, sharding: Any = None) -> Any:
    """A device array with a copy of a CPU tensor. The tensor may be changed as soon as this returns.

    Args:
        tensor: on the CPU.
        dtype: of the array; default None, that of the tensor.
        sharding: a JAX sharding: how the contents shall lie on several devices, each of which gets its part alone.
            Default None, the one device.

    Raises:
        RuntimeError: for a sparse or quantized tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        layout = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise RuntimeError(
            f"the xla device has dense tensors only, and this one of shape {tuple(tensor.shape)} is {layout}; make it "
            f"dense first, with {'.dequantize()' if tensor.is_quantized else '.to_dense()'}"
        )
    array = _as_array(tensor.detach().resolve_conj().resolve_neg().to(dtype or tensor.dtype))
    counters.add("TransferToDevice")
    with measurements.timed("TransferToDeviceTime"):
        if sharding is None:
            return _put(array, default_device())
        with x64():
            return _spread(array, sharding)


def _put(array: np.ndarray[Any, Any], device: Any) -> Any:
    """A copy of `array` on `device`; of one zero expanded, on the CPU, memory that nobody touches until a run needs it.

    So optimizer state has no memory while the first step is compiled, which is when most is needed.
    """
    if array.size > 1 and not any(array.strides) and device.platform == "cpu":
        element = array[(0,) * array.ndim]
        if not any(element.tobytes()):
            return put_on_device(_aligned(array, np.zeros), device, copied=False)
    return put_on_device(array, device)


def _spread(array: np.ndarray[Any, Any], sharding: Any) -> Any:
    """A device array with the contents of `array`, each device of this process having its part."""
    where = sharding.addressable_devices_indices_map(array.shape)
    pieces = [_put(array[index], device) for device, index in where.items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


def from_process(tensor: torch.Tensor, shape: tuple[int, ...], sharding: Any) -> Any:
    """A device array of `shape` of which each process gives its part in `tensor`, a CPU tensor."""
    counters.add("TransferToDevice")
    with measurements.timed("TransferToDeviceTime"), x64():
        return jax.make_array_from_process_local_data(sharding, _private_copy(_as_array(tensor)), shape)


def moved(buffer: Any, sharding: Any) -> Any:
    """The contents of a device array on other devices: as `sharding` says; None for the one device."""
    with x64():
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(buffer, default_device() if sharding is None else sharding)
        return _spread(np.asarray(_whole(buffer)), sharding)


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The memory of a dense CPU tensor as an array."""
    dtype = to_numpy(tensor.dtype)
    if dtype.isbuiltin != 1:  # torch and numpy share no name for it: the bits are handed over
        bits: np.ndarray[Any, Any] = np.from_dlpack(tensor.contiguous().view(_BITS[tensor.element_size()]))
        return bits.view(dtype)
    return np.from_dlpack(tensor)  # `tensor.numpy()` would forbid the user to resize the tensor ever after


def _private_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that JAX may keep, aligned so that it can use the memory itself instead of copying once more.

    numpy copies on this thread: torch would wake its own threads, which then spin and take the cores from XLA's.
    """
    copy = _aligned(array, np.empty)
    np.copyto(copy, array)
    return copy


def _aligned(array: np.ndarray[Any, Any], make: Callable[..., np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """An array like `array`, contiguous and aligned for JAX, with what `make` (`np.empty`, `np.zeros`) has in it."""
    raw = make(array.nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)


def compiler_options() -> dict[str, Any]:
    """Options for XLA's compiler on the platform in use.

    On the CPU, the pass is left out that removes optimization barriers before fusion: see `lowerings.fusion`. So is the
    one that makes a loop over less than a kilobyte a single kernel, which cannot have barriers in it; without, such a
    loop takes a microsecond more. Region analysis sees that a donated buffer can be written in place where the default
    copies it first: of the 38 MB of parameters and Adam's state that a small transformer's step copied, 13 are left.
    """
    if default_device().platform != "cpu":
        return {}
    return {
        "xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting",
        "xla_cpu_copy_insertion_use_region_analysis": True,
    }


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep torch's CPU operators on one thread while XLA computes on the CPU; nothing happens on other platforms.

    torch's threads spin for some milliseconds after each parallel operator, on the cores that XLA needs: a training
    step was measured to take half as long again.
    """
    if default_device().platform != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def copies(buffers: Sequence[Any]) -> list[Any]:
    """Copies of device arrays on the device, which may still be being made; compiles nothing."""
    with x64():
        return list(jax.device_put(list(buffers), [buffer.sharding for buffer in buffers], may_alias=False))


def to_host(buffer: Any) -> torch.Tensor:
    """A CPU tensor of its own with the contents of a device array; waits for it, which counts as part of the copy."""
    counters.add("TransferFromDevice")
    with measurements.timed("TransferFromDeviceTime"):
        return _copied(buffer)


def _whole(buffer: Any) -> Any:
    """What of a device array can be read as one: the array, or what one device has of it if each has it whole.

    Of an array that is spread over several processes all of them must ask: it is gathered.
    """
    if buffer.is_fully_replicated:
        return buffer if len(buffer.sharding.device_set) == 1 else buffer.addressable_data(0)
    return buffer if buffer.is_fully_addressable else multihost_utils.process_allgather(buffer, tiled=True)


def _copied(buffer: Any) -> torch.Tensor:
    buffer = _whole(buffer)
    dtype = from_numpy(buffer.dtype)
    on_one = isinstance(buffer, jax.Array) and len(buffer.sharding.device_set) == 1
    if on_one and default_device().platform == "cpu" and buffer.size and dtype.itemsize > 1:
        return torch.from_dlpack(buffer).clone()
    host = np.asarray(buffer)
    if host.dtype.isbuiltin != 1:
        host = host.view(to_numpy(_BITS[host.dtype.itemsize]))
    with warnings.catch_warnings():  # JAX's array is read-only, which the clone does not care about
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(host).clone().view(dtype)
