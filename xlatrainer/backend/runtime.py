"""The XLA platform behind the device: JAX devices, host copies, random keys. Knows nothing of tensors' records.

JAX is asked for its devices at the first use, never at import. 64-bit types are switched on around our own work only.

May import: jax, torch, numpy, host_memory, dtypes, config, counters, measurements.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from xlatrainer import config
from xlatrainer.backend import counters, measurements
from xlatrainer.backend.dtypes import from_numpy, to_numpy
from xlatrainer.backend.host_memory import keep_freed_memory

__all__ = [
    "compiler_options",
    "copies",
    "default_device",
    "local_devices",
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
    return jax.local_devices(backend=_PLATFORMS[name.upper()])


class _Chosen:
    device: Any = None


def default_device() -> Any:
    """The JAX device that `xla:0` stands for; chosen at the first call."""
    if _Chosen.device is None:
        keep_freed_memory()
        _Chosen.device = local_devices()[0]
    return _Chosen.device


def num_live_arrays() -> int:
    """How many arrays there are on the device, those of other users of JAX in this process included."""
    return len(jax.live_arrays(default_device().platform))


_BITS = {1: torch.int8, 2: torch.int16}
_ALIGNMENT = 64  # bytes; what XLA's CPU client asks of memory that it does not copy


def to_device(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """A device array with a copy of a CPU tensor. The tensor may be changed as soon as this returns.

    Args:
        tensor: on the CPU.
        dtype: of the array; default None, that of the tensor.

    Raises:
        RuntimeError: for a sparse or quantized tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        layout = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise RuntimeError(
            f"the xla device has dense tensors only, and this one of shape {tuple(tensor.shape)} is {layout}; make it "
            f"dense first, with {'.dequantize()' if tensor.is_quantized else '.to_dense()'}"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg().to(dtype or tensor.dtype)
    kind = to_numpy(tensor.dtype)
    if kind.isbuiltin != 1:  # torch and numpy share no name for it: the bits are handed over
        array = np.from_dlpack(tensor.contiguous().view(_BITS[tensor.element_size()])).view(kind)
    else:
        array = np.from_dlpack(tensor)  # `tensor.numpy()` would forbid the user to resize the tensor ever after
    counters.add("TransferToDevice")
    with measurements.timed("TransferToDeviceTime"), x64():
        return jax.device_put(_private_copy(array), default_device())


def _private_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that JAX may keep, aligned so that it can use the memory itself instead of copying once more.

    numpy copies on this thread: torch would wake its own threads, which then spin and take the cores from XLA's.
    """
    raw = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def compiler_options() -> dict[str, Any]:
    """Options for XLA's compiler on the platform in use.

    On the CPU, the pass is left out that removes optimization barriers before fusion: see `lowerings.fusion`. Region
    analysis sees that a donated buffer can be written in place where the default copies it first: of the 38 MB of
    parameters and Adam's state that a small transformer's step copied, 13 are left.
    """
    if default_device().platform != "cpu":
        return {}
    return {"xla_disable_hlo_passes": "cse_barrier_expander", "xla_cpu_copy_insertion_use_region_analysis": True}


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
        return list(jax.device_put(list(buffers), default_device(), may_alias=False))


def to_host(buffer: Any) -> torch.Tensor:
    """A CPU tensor of its own with the contents of a device array; waits for it, which counts as part of the copy."""
    counters.add("TransferFromDevice")
    with measurements.timed("TransferFromDeviceTime"):
        return _copied(buffer)


def _copied(buffer: Any) -> torch.Tensor:
    dtype = from_numpy(buffer.dtype)
    if default_device().platform == "cpu" and buffer.size and dtype.itemsize > 1:
        return torch.from_dlpack(buffer).clone()
    host = np.asarray(buffer)
    if host.dtype.isbuiltin != 1:
        host = host.view(to_numpy(_BITS[host.dtype.itemsize]))
    with warnings.catch_warnings():  # JAX's array is read-only, which the clone does not care about
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(host).clone().view(dtype)
