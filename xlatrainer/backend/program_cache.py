"""Compiled programs on disk, so that a second process compiles nothing.

A program is found by what it was compiled from: the recorded operators, this package's source, the versions of torch
and jax, the platform, XLA's options. A file holds a line of JSON (the checks, the hash of the rest) and the executable
as XLA serializes it. Files are written under a temporary name and renamed, so several processes may share a folder; a
damaged one is replaced.

An executable is machine code: the folder must be the user's own, and is left alone if it belongs to somebody else.

May import: ir, placement, runtime, lowerings.checks, dtypes, counters, config, errors, _private_api.
"""

import builtins
import hashlib
import json
import logging
import os
import platform
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from xlatrainer import config
from xlatrainer.backend import counters, runtime
from xlatrainer.backend._private_api import load_executable, serialize_executable
from xlatrainer.backend.dtypes import to_numpy
from xlatrainer.backend.ir import Node, Spec
from xlatrainer.backend.lowerings.checks import FAILURE_SHAPE
from xlatrainer.backend.placement import Home, Sharding
from xlatrainer.errors import CacheError

__all__ = ["Entry", "initialize_cache", "key_of", "load", "store", "written_out"]

_log = logging.getLogger("xlatrainer.cache")

_MAGIC = "xlatrainer program 2"
_SUFFIX = ".xla"
_LOOK_EVERY = 64  # files written between two looks at the size of the folder


Check = tuple[type[Exception], str, int]


@dataclass(frozen=True)
class Entry:
    """A program as it is kept: what to call, its checks as (exception, message, index of the node), how results lie."""

    run: Callable[..., Any]
    checks: list[Check]
    shardings: list[Sharding | None]


def folder() -> Path | None:
    """Where programs are kept; None if they are not."""
    setting = str(config.get("cache_dir"))
    if setting.lower() == "off":
        return None
    if setting:
        return Path(setting).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "xlatrainer" / "programs"


def initialize_cache(path: str | os.PathLike[str], readonly: bool = False) -> None:
    """Keep compiled programs in a folder of your own from now on, in place of the user's cache folder.

    Args:
        path: the folder; it is made if need be.
        readonly: only look for programs there. Default False, which writes those that are compiled.

    Raises:
        OSError: if the folder cannot be made.
    """
    if not readonly:
        Path(path).expanduser().mkdir(parents=True, exist_ok=True)
    config.put(cache_dir=os.fspath(path), cache_readonly="on" if readonly else "off")


def key_of(
    nodes: Sequence[Node],
    outputs: Sequence[int],
    donated: Sequence[bool],
    numbers: tuple[int, int, str],
    home: Home | None = None,
    wanted: Sequence[Sharding | None] = (),
) -> str | None:
    """A name for the program of these nodes; None if it is not to be kept.

    That is so without a folder, for programs that carry the user's lines, for the devices of several processes, whose
    parts of a program differ, and for an operator that has no text that says all of it.

    Args:
        nodes: what is computed.
        outputs: slots of what it gives.
        donated: for each leaf, whether it is given to the program.
        numbers: how many floats and ints are lifted, and which of them are equal.
        home: the devices; None: the one device.
        wanted: how results shall lie on them.
    """
    if home is not None and home.spans_processes:
        return None
    if folder() is None or config.get("hlo_debug") == "1":
        return None
    digest = hashlib.sha256(_surroundings().encode())
    digest.update(repr((tuple(outputs), tuple(donated), numbers, config.get("check_indices"))).encode())
    digest.update(torch.get_float32_matmul_precision().encode())
    if home is not None:
        digest.update(f"{home.text} {wanted}".encode())
    for node in nodes:
        operation = node.operation
        if operation.identity is None or " at 0x" in operation.identity:
            return None
        digest.update(f"{operation.name} {operation.identity} {node.operands} {operation.outputs}\n".encode())
    return digest.hexdigest()


def load(key: str, outputs: Sequence[Spec], home: Home | None = None, mesh: Any = None) -> Entry | None:
    """The program kept under `key`; None if there is none that can be used.

    Args:
        key: see `key_of`.
        outputs: what it gives, without the result of its checks.
        home: the devices; None: the one device.
        mesh: the JAX mesh of them that the program was lowered for.
    """
    path = _path(key)
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        header, payload = _parse(content, key)
        checks = [(_exception_named(kind), str(message), int(node)) for kind, message, node in header["checks"]]
        run, shardings = _loaded(payload, header, outputs, bool(checks), home, mesh)
    except CacheError as error:
        counters.add("PersistentCacheDamaged")
        _log.warning("the compiled program %s is damaged and is made anew: %s", path, error)
        return None
    except jax.errors.JaxRuntimeError as error:
        counters.add("PersistentCacheDamaged")
        _log.warning("XLA does not take the compiled program %s, which is made anew: %s", path, error)
        return None
    counters.add("PersistentCacheHit")
    os.utime(path)  # the least recently used go first
    return Entry(run, checks, shardings)


def _loaded(
    payload: bytes, header: dict[str, Any], outputs: Sequence[Spec], is_checked: bool, home: Home | None, mesh: Any
) -> tuple[Callable[..., Any], list[Sharding | None]]:
    """What runs the program, and how its results lie."""
    shardings: list[Sharding | None] = [None] * len(outputs)
    device: Any = runtime.default_device()
    devices, place, whole = [device], device, jax.sharding.SingleDeviceSharding(device)
    if home is not None:
        lie = zip(header["shardings"], outputs, strict=True)
        shardings = [home.described(description, len(spec.shape)) for description, spec in lie]
        devices, place, whole = list(home.devices), home.replicated.on(mesh), home.replicated.on(mesh)
    results = [
        jax.ShapeDtypeStruct(spec.shape, to_numpy(spec.held), sharding=whole if sharding is None else sharding.on(mesh))
        for spec, sharding in zip(outputs, shardings, strict=True)
    ]
    results += [jax.ShapeDtypeStruct(FAILURE_SHAPE, np.int64, sharding=whole)] if is_checked else []
    return load_executable(payload, results, devices, place), shardings


def _parse(content: bytes, key: str) -> tuple[dict[str, Any], bytes]:
    first, _, body = content.partition(b"\n")
    try:
        header = json.loads(first)
    except ValueError:
        raise CacheError("it does not begin with a header") from None
    if not isinstance(header, dict) or header.get("magic") != _MAGIC or header.get("key") != key:
        raise CacheError("its header is that of another file")
    if len(body) != header["size"] or hashlib.sha256(body).hexdigest() != header["sha256"]:
        raise CacheError(f"its contents are not those that were written ({len(body)} bytes)")
    return header, zlib.decompress(body)  # whole by its hash


def written_out(compiled: Any) -> bytes | None:
    """A compiled program for `store`, as XLA writes it; None if nothing is to be kept, or if XLA cannot write it.

    Before it runs first: some parts, a sort for one, then take on what XLA cannot write.
    """
    if config.get("cache_readonly") == "on":
        return None
    try:
        return serialize_executable(compiled)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("UNIMPLEMENTED"):
            raise
        _log.warning("a program is compiled by each process, since XLA cannot write it to the cache: %s", error)
        return None


def store(key: str, content: bytes, checks: Iterable[Check], shardings: Iterable[Sharding | None] = ()) -> None:
    """Keep a program under `key`. A folder that cannot be written to is reported, and nothing is kept.

    Args:
        key: of `key_of`.
        content: of `written_out`.
        checks: what its last output tells of.
        shardings: how its results lie on several devices.
    """
    path = _path(key)
    described = [None if sharding is None else sharding.described() for sharding in shardings]
    if path is None or None in described:
        return
    body = zlib.compress(content, 1)
    header = {
        "magic": _MAGIC,
        "key": key,
        "size": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
        "checks": [(kind.__name__, message, node) for kind, message, node in checks],
        "shardings": described,
    }
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(header).encode() + b"\n" + body)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _log.warning("compiled programs are not kept: %s", error)
        return
    counters.add("PersistentCacheWrite")
    if counters.value("PersistentCacheWrite") % _LOOK_EVERY == 1:
        _bound_size(path.parent)


def _path(key: str) -> Path | None:
    place = folder()
    if place is None:
        return None
    if config.get("cache_readonly") == "on" and not place.exists():
        return None
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = place.stat().st_uid
    except OSError as error:
        _log.warning("compiled programs are not kept: %s", error)
        return None
    if hasattr(os, "getuid") and owner != os.getuid():
        _log.warning("%s belongs to another user: the programs in it are not used", place)
        return None
    return place / (key + _SUFFIX)


def _bound_size(place: Path) -> None:
    """Remove the least recently used programs until the folder is within its bound."""
    files = []
    for path in place.glob("*" + _SUFFIX):
        try:
            status = path.stat()
        except FileNotFoundError:  # removed by another process
            continue
        files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    bound = int(config.get("cache_megabytes")) * 2**20
    for _, size, path in sorted(files):
        if total <= bound:
            return
        path.unlink(missing_ok=True)
        total -= size


@cache
def _surroundings() -> str:
    """Everything besides the recorded operators that a compiled program depends on."""
    device = runtime.default_device()
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return repr(
        (
            source.hexdigest(),
            torch.__version__,
            jax.__version__,
            metadata.version("jaxlib"),
            device.platform,
            device.device_kind,
            device.client.platform_version,
            sorted(runtime.compiler_options().items()),
            os.environ.get("XLA_FLAGS"),
            os.environ.get("LIBTPU_INIT_ARGS"),
            platform.machine(),
            _processor() if device.platform == "cpu" else None,
        )
    )


def _processor() -> str:
    """What the machine code of this processor may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _exception_named(name: str) -> type[Exception]:
    """The exception class of a kept check."""
    singular = torch.linalg.LinAlgError
    found = singular if name == singular.__name__ else getattr(builtins, name, None)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise CacheError(f"it names an exception {name!r} that does not exist")
    return found
