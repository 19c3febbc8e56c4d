"""The only file that touches private parts of torch and jax; each with its reason and where it was seen to work.

Seen with torch 2.11 to 2.14 and jax 0.10. Everything above calls these names.
"""

import contextlib
import importlib.abc
import importlib.util
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

import jax
import torch
from jax._src import distributed
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = [
    "AUTOCAST_KEY",
    "AUTOGRAD_KEY",
    "BACKEND_KEY",
    "TorchDispatchMode",
    "alias_as_strided",
    "alias_view",
    "all_overloads",
    "ambient_state",
    "aot_autograd",
    "bare_optimizer",
    "bare_step",
    "call_autograd_kernel",
    "call_composite_kernel",
    "call_implicit_kernel",
    "call_meta_kernel",
    "coordination_client",
    "create_tensor",
    "find_overload",
    "function_transforms_active",
    "has_kernel",
    "has_lasting_workers",
    "interruptible",
    "load_executable",
    "module_of_call",
    "positional_until",
    "put_on_device",
    "register_backend",
    "register_compiler",
    "serialize_executable",
    "size_hint",
    "shut_down_workers",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
    "without_autocast",
]

BACKEND_KEY = "PrivateUse1"
AUTOGRAD_KEY = "AutogradPrivateUse1"
AUTOCAST_KEY = "AutocastPrivateUse1"

# A plain `torch.Tensor` on the renamed PrivateUse1 device, contiguous, with an empty storage of its own:
# there is no public way to make one without a C++ extension (torch 2.11+).
create_tensor: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] = torch._C._acc.create_empty_tensor

# The Meta kernels of as_strided and view make a new tensor over the storage of `self`: they only write sizes and
# strides and, unlike the CPU's, do not compare them with the size of the storage, which is empty here.
_IncludeKey = torch._C._IncludeDispatchKeyGuard
_META = DispatchKey.Meta
_aten_as_strided = torch.ops.aten.as_strided.default
_aten_view = torch.ops.aten.view.default


def _guard_restores() -> bool:
    """Whether torch's guard for an included key leaves the dispatcher as it was: not in torch 2.11."""
    included, excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
    with torch._C._ForceDispatchKeyGuard(included(), excluded()):  # puts everything back after the trial
        before = included().raw_repr()
        with _IncludeKey(_META):
            pass
        return bool(included().raw_repr() == before)


def _guarded_as_strided(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    with _IncludeKey(_META):
        return torch.as_strided(tensor, size, stride, offset)


def _guarded_view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    with _IncludeKey(_META):
        return tensor.view(size)


# To be called from within a kernel. `alias_as_strided(tensor, size, stride, offset)` is a tensor of that geometry (in
# elements) over the storage of `tensor`, `alias_view(tensor, size)` is `tensor.view(size)`. The guard makes torch
# choose its Meta kernel at two thirds of the cost of calling that kernel.
alias_as_strided: Callable[..., torch.Tensor]
alias_view: Callable[..., torch.Tensor]
if _guard_restores():
    alias_as_strided, alias_view = _guarded_as_strided, _guarded_view
else:
    alias_as_strided, alias_view = partial(_aten_as_strided._op_dk, _META), partial(_aten_view._op_dk, _META)


def call_meta_kernel(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the Meta kernel of `overload` on device tensors: for operators that only change sizes and strides."""
    return overload._op_dk(_META, *args, **kwargs)


def call_composite_kernel(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the one kernel that torch has of `overload` for all backends, on device tensors, from within our own kernel.

    Only for overloads that have such a kernel: torch calls a null pointer for others.
    """
    if not _has_composite_kernel(overload):
        raise RuntimeError(f"{overload.name()} has no kernel for all backends in torch {torch.__version__}")
    return overload._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


@cache
def _has_composite_kernel(overload: Any) -> bool:
    return has_kernel(overload, "CompositeExplicitAutograd")


def call_autograd_kernel(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch does at its autograd key: record the gradient that torch has for `overload`, and go on to our kernel.

    For a kernel of ours at that key, of which torch cannot be asked for "the one before".
    """
    return overload._op_dk(DispatchKey.Autograd, *args, **kwargs)


def call_implicit_kernel(overload: Any, *args: Any) -> Any:
    """What torch makes of other operators, by the kernel it has for all devices and for autograd.

    For a kernel of ours in its place. `overload.decompose` would take torch's Python for it, where there is some.
    """
    return overload._op_dk(DispatchKey.CompositeImplicitAutograd, *args)


def function_transforms_active() -> bool:
    """True inside of `torch.func` (vmap, grad, ...), where an `autograd.Function` must be written in another style."""
    return bool(torch._C._are_functorch_transforms_active())


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _DeviceGuard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


# torch keeps pointers to these two; they must never be collected.
_KEPT: list[Any] = []


def _is_xla(tensor: torch.Tensor) -> bool:
    """True if the tensor is on the `xla` device."""
    return tensor.device.type == "xla"


def register_backend(name: str, module: Any) -> None:
    """Rename PrivateUse1 to `name` and register the device module, the hooks and the device guard with torch.

    `torch.utils.generate_methods_for_privateuse1_backend` cannot be used: it refuses the name, since
    `torch.Tensor.is_xla` exists. The existing property asks for torch's built-in XLA key and is made to answer for
    ours.
    """
    hooks, guard = _Hooks(), _DeviceGuard()
    _KEPT.extend((hooks, guard))
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, module)
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    torch.Tensor.is_xla = property(_is_xla)  # type: ignore[attr-defined]


_OPENXLA = "torch._dynamo.backends.torchxla"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the module in which torch registers `openxla` as what `register_compiler` was given."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == _OPENXLA else None

    def exec_module(self, module: ModuleType) -> None:
        register = sys.modules["torch._dynamo.backends.registry"].register_backend
        register(getattr(importlib.import_module(self.module), self.name), name=self.name)


def register_compiler(module: str, name: str) -> None:
    """Let `torch.compile(backend=name)` find the function `name` of `module`, which is imported when it is looked for.

    torch registers a backend `openxla` that needs torch_xla, in a module that it imports when a backend is looked for.
    A name cannot be registered twice, and to import TorchDynamo now would take seconds (torch 2.11+).
    """
    finder = _Finder(module, name)
    if _OPENXLA in sys.modules:
        registry = sys.modules["torch._dynamo.backends.registry"]
        registry._COMPILER_FNS.pop(name, None)
        finder.exec_module(sys.modules[_OPENXLA])
    else:
        sys.meta_path.insert(0, finder)


def aot_autograd(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A backend for `torch.compile` that has AOTAutograd make the graphs which `compiler` compiles (torch 2.11+)."""
    common = importlib.import_module("torch._dynamo.backends.common")
    return common.aot_autograd(fw_compiler=compiler)


def size_hint(size: Any) -> int:
    """A size or stride of a fake tensor as an int: of a symbolic one the example that it was traced with (torch 2.11+).

    `int(size)` would make the graph one for this size alone.
    """
    return size if isinstance(size, int) else int(size.node.hint)


def all_overloads() -> list[Any]:
    """Every overload of the `aten` namespace that this torch has, as `OpOverload` objects."""
    overloads = []
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        if not qualified.startswith("aten::"):
            continue
        name, _, overload = qualified[len("aten::") :].partition(".")
        packet = getattr(torch.ops.aten, name, None)
        found = getattr(packet, overload or "default", None) if packet is not None else None
        if found is not None:
            overloads.append(found)
    return overloads


def find_overload(name: str) -> Any:
    """The overload of the `aten` namespace called `name` ("softmax.int", "mm"), None if this torch has none."""
    if not torch._C._dispatch_has_kernel(f"aten::{name}"):
        return None
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def positional_until(overload: Any, argument: str) -> int:
    """How many arguments of `overload` come before the one of that name."""
    return [each.name for each in overload._schema.arguments].index(argument)


# Not in torch's type stubs.
_AUTOCAST_KEYS = torch._C.DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def without_autocast() -> Any:
    """A context in which operators go past the autocast key: for a kernel of ours at that key, to call its operator."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def has_kernel(overload: Any, key: str) -> bool:
    """True if `overload` has a kernel registered for exactly this dispatch key (alias keys count as themselves)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key)


def module_of_call(frame: FrameType) -> torch.nn.Module | None:
    """The module whose call this frame is, if it is torch's frame around a module's `forward`.

    Hooks would tell as well, but would have to be there before anybody asks, and cost something in each call.
    """
    if frame.f_code is not torch.nn.Module._call_impl.__code__:
        return None
    module = frame.f_locals["self"]
    return module if isinstance(module, torch.nn.Module) else None


def ambient_state() -> tuple[Any, ...]:
    """torch's modes on this thread that change what a function records, to compare.

    Whether a `TorchDispatchMode` or `TorchFunctionMode` is active can be asked of `torch._C` alone (torch 2.11+).
    """
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("xla"),
        torch.get_autocast_dtype("xla"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


def serialize_executable(compiled: Any) -> bytes:
    """What XLA writes of a compiled program.

    `jax.experimental.serialize_executable` does the same, but its format is a pickle, which runs code when it is read.
    """
    executable = compiled.runtime_executable()
    return bytes(executable.client.serialize_executable(executable))


def put_on_device(array: Any, device: Any, copied: bool = True) -> Any:
    """A JAX array on `device` with a copy of a numpy array, which may be changed afterwards; 64-bit types stay.

    Without `copied`, the CPU's array may look at the memory of numpy's. JAX copies that when a program is to write its
    results over it; so it does after `jax.device_put`, which ends in the same call of jaxlib, with ten times as much
    Python before it (jax 0.10).
    """
    aval = jax.core.ShapedArray(array.shape, array.dtype)
    sharding = jax.sharding.SingleDeviceSharding(device)
    kinds = xla_client.HostBufferSemantics
    kind = kinds.IMMUTABLE_ONLY_DURING_CALL if copied else kinds.ZERO_COPY
    return xla_client.batched_device_put(aval, sharding, [array], [device], True, False, kind, enable_x64=True)


def _prepare_library_calls(program: bytes) -> None:
    """Have the functions there that a serialized program for the CPU calls (jaxlib 0.10).

    jaxlib finds LAPACK's in scipy when an operator that needs one is lowered. A program that another process lowered
    would call them at address 0.
    """
    if b"lapack_" in program:
        from jaxlib import lapack  # here, since it imports scipy

        # Whichever operator is named, all are filled in. jaxlib does not annotate the function.
        lapack.prepare_lapack_call("potrf", jax.numpy.dtype("float32"))  # type: ignore[no-untyped-call]


def load_executable(
    content: bytes, outputs: Sequence[Any], devices: Sequence[Any], place: Any
) -> Callable[..., list[Any]]:
    """A function that runs what `serialize_executable` wrote (jax 0.10).

    Args:
        content: the serialized program.
        outputs: a `jax.ShapeDtypeStruct` for each result, with its sharding.
        devices: the JAX devices to run on, in the order of the program's.
        place: the device or the sharding that inputs which are no JAX arrays are put on.
    """
    _prepare_library_calls(content)
    executable = devices[0].client.deserialize_executable(
        content, executable_devices=xla_client.DeviceList(tuple(devices))
    )
    handlers = [
        pxla.global_aval_to_result_handler(jax.core.ShapedArray(output.shape, output.dtype), output.sharding, True)
        for output in outputs
    ]

    def run(*inputs: Any) -> list[Any]:
        arrays = [x if isinstance(x, jax.Array) else jax.device_put(x, place) for x in inputs]
        return list(executable.execute_sharded(arrays).consume_with_handlers(handlers))

    run.memory_analysis = executable.get_compiled_memory_stats  # type: ignore[attr-defined]  # as jax's Compiled has
    return run


def bare_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer of the same class and attributes without state, hooks or a scheduler's counter around its `step`.

    Its param groups are still those of `optimizer`. A constructor would want arguments that are not kept, and the hooks
    of one optimizer stand in private attributes (torch 2.11+).
    """
    bare: Any = object.__new__(type(optimizer))
    vars(bare).update(vars(optimizer))
    vars(bare).pop("step", None)
    bare._optimizer_step_pre_hooks = OrderedDict()
    bare._optimizer_step_post_hooks = OrderedDict()
    bare.state = defaultdict(dict)
    return bare


def bare_step(optimizer: Any) -> None:
    """`optimizer.step()` without the hooks that are set for all optimizers and the profiler's record."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


_SECONDS_TO_LOOK = 0.25


def has_lasting_workers(loader: Any) -> bool:
    """Whether a DataLoader with `persistent_workers=True` has started its workers; no public name tells."""
    return loader._iterator is not None


@contextlib.contextmanager
def interruptible(iterator: Any, is_given_up: Callable[[], bool]) -> Iterator[None]:
    """Let a DataLoader's iterator, while it waits for a worker, look often whether it is still wanted and they live.

    It looks every five seconds otherwise, and there is no public way to wake it. What is no iterator of a DataLoader
    with workers is left as it is.
    """
    wait = getattr(iterator, "_try_get_data", None)
    if wait is None:
        yield
        return

    def look(seconds: float = _SECONDS_TO_LOOK) -> Any:
        if is_given_up():
            raise RuntimeError("the batches of this DataLoader are not wanted any more")
        return wait(seconds)

    iterator._try_get_data = look
    try:
        yield
    finally:
        del iterator._try_get_data


def shut_down_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator now, if it has any that are not to be used again.

    There is no public way but to drop the iterator, which the traceback of an error holds.
    """
    if hasattr(iterator, "_shutdown_workers") and not iterator._persistent_workers:
        iterator._shutdown_workers()


def coordination_client() -> Any:
    """The connection to the service that joined this process with others: keys and values that all see.

    Private because: jax has public names for joining and leaving only, and collectives that run on the devices.

    Raises:
        RuntimeError: In a process that was not joined with others.
    """
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("this process was not joined with others; see xlatrainer.launch")
    return client
