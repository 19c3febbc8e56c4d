"""One call of a function, run as always and watched: where its program's inputs came from and where its outputs went.

May import: snapshot, optimizers, optimizer_state, arguments, host_arguments, executor, tensor, strided, state, garbage,
ir, _private_api.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from xlatrainer.backend._private_api import tree_flatten
from xlatrainer.backend.executor import run_pending
from xlatrainer.backend.garbage import collector_paused
from xlatrainer.backend.ir import DeviceData, Node, Value
from xlatrainer.backend.program import Program
from xlatrainer.backend.replay.arguments import flattened
from xlatrainer.backend.replay.host_arguments import HostReads, opaque_arguments
from xlatrainer.backend.replay.optimizer_state import initialize_state_of_step
from xlatrainer.backend.replay.optimizers import Section, Shadow, Unlike
from xlatrainer.backend.replay.snapshot import Cell, Snapshot, same
from xlatrainer.backend.state import state
from xlatrainer.backend.strided import Geometry
from xlatrainer.backend.tensor import StorageData, storage_data
from xlatrainer.errors import GraphBreakError

__all__ = ["STEP_BEGINS", "STEP_ENDS", "Observation", "Origin", "observe", "whole_graph"]

STEP_BEGINS, STEP_ENDS = "a compiled function begins", "a compiled function ends"
MAX_CONSTANT_BYTES = 1_000_000  # of a host tensor that a step copies to the device and that is compared


@dataclass(frozen=True)
class Origin:
    """Where a value comes from, or what a result is.

    `kind` is "cell" (a place of the snapshot, `key`), "argument" or "upload" (a tensor among the arguments, on the
    device or on the CPU), "view" (of the tensor that comes from `key`), "constant" (a host tensor copied in every
    step), "output" (slot of the program) or "leaf" (an input of the program handed on), "value" (plain data, in `key`).
    """

    kind: str
    key: Any


@dataclass
class Observation:
    """What was seen; `reasons` says why the call could not be replayed, and is empty if it could.

    Attributes:
        result: what the function returned.
        sources: of each leaf of the program; all places that held the same value.
        read_on_host: contents of CPU tensors among the arguments that the function's Python read.
        updates: storages that were given another value: the place of a tensor over it, and its origin.
        rebound: places that were given a new tensor, by the origin of its value; places of one tensor together.
        moved: places that were given a tensor which another place, or an argument, had before.
        outputs: an `Origin` for each leaf of the result; `geometries` says how new tensors among them look at it,
            `views` which earlier leaf has the storage that a leaf looks at.
        sections: of each optimizer's step: its first float, how many, and how they follow from the shadow's.
    """

    result: Any = None
    reasons: list[str] = field(default_factory=list)
    node: Node | None = None
    program: Program | None = None
    sources: list[list[Origin]] = field(default_factory=list)
    constants: dict[int, tuple[torch.Tensor, Value]] = field(default_factory=dict)
    read_on_host: dict[int, torch.Tensor] = field(default_factory=dict)
    floats: list[float] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    draws: int = 0
    updates: list[tuple[Origin, Origin]] = field(default_factory=list)
    rebound: list[tuple[tuple[Any, ...], Origin, Geometry | None, bool]] = field(default_factory=list)
    moved: list[tuple[Any, Origin]] = field(default_factory=list)
    outputs: list[Origin] = field(default_factory=list)
    geometries: dict[int, Geometry | None] = field(default_factory=dict)
    views: dict[int, int] = field(default_factory=dict)
    result_tree: Any = None
    sections: list[tuple[int, int, Section]] = field(default_factory=list)
    shadows: dict[int, Shadow] = field(default_factory=dict)
    settings: list[Any] = field(default_factory=list)
    snapshot: Snapshot | None = None

    def difference(self, earlier: "Observation") -> str | None:
        """Why `earlier` was another step than this one, None if it was the same."""
        if earlier.reasons or self.reasons:
            return (self.reasons or earlier.reasons)[0]
        if self.node is not earlier.node or self.program is not earlier.program:
            return f"it recorded other operators than before{_first_difference(earlier.node, self.node)}"
        if len(self.sections) != len(earlier.sections) or not all(
            mine[:2] == theirs[:2] and mine[2].matches(theirs[2])
            for mine, theirs in zip(self.sections, earlier.sections, strict=True)
        ):
            return "an optimizer computed its numbers in another way than before"
        if not same(self._numbers(), earlier._numbers()):
            return f"it computed with other Python numbers than before{self._changed_number(earlier)}"
        for position, (tensor, _) in self.constants.items():
            before = earlier.constants.get(position)
            if before is None or not torch.equal(tensor, before[0]):
                return f"it copied other contents to the device than before: a CPU tensor {list(tensor.shape)}"
        if self.read_on_host.keys() != earlier.read_on_host.keys() or not all(
            torch.equal(tensor, earlier.read_on_host[index]) for index, tensor in self.read_on_host.items()
        ):
            return "it read a CPU tensor among its arguments, which had other contents before"
        if self._places() != earlier._places():
            return "it read or wrote other tensors than before"
        if self._returned() != earlier._returned():
            return "it returned something else than before"
        return None

    def _numbers(self) -> tuple[list[float], list[int]]:
        """The numbers that no optimizer's shadow gives."""
        floats = list(self.floats)
        for first, count, _ in self.sections:
            floats[first : first + count] = [0.0] * count
        return floats, self.ints

    def _places(self) -> tuple[Any, ...]:
        return self.sources, self.updates, self.rebound, self.moved

    def _returned(self) -> tuple[Any, ...]:
        return self.outputs, self.geometries, self.views, self.result_tree

    def _changed_number(self, earlier: "Observation") -> str:
        assert self.node is not None
        position = {"float": 0, "int": 0}
        mine, theirs = self._numbers(), earlier._numbers()
        for node in self.node.path():
            for kind, now, before, count in (
                ("float", mine[0], theirs[0], node.operation.num_floats),
                ("int", mine[1], theirs[1], node.operation.num_ints),
            ):
                part = slice(position[kind], position[kind] + count)
                if not same(now[part], before[part]):
                    return f": {node.operation.name} at {node.line} took {before[part]}, then {now[part]}"
                position[kind] += count
        return ""


def _first_difference(before: Node | None, now: Node | None) -> str:
    if before is None or now is None:
        return ""
    for old, new in zip(before.path(), now.path(), strict=False):
        if old is not new:
            return f": {new.operation.name} at {new.line}, where it was {old.operation.name} at {old.line}"
    return f": {len(now.path())} instead of {len(before.path())}"


class _Watch:
    """What the device reports while a function is observed; see `state.observer`."""

    def __init__(self, must_be_whole: bool) -> None:
        self.must_be_whole = must_be_whole
        self.interruptions: list[str] = []
        self.uploads: dict[int, tuple[torch.Tensor, Value]] = {}  # by id of the buffer; kept, so never donated
        self.sections: list[tuple[Shadow, Node, int, Section]] = []
        self.shadows: dict[int, Shadow] = {}
        self._open: dict[int, tuple[Shadow, Node, list[float], Node, int]] = {}

    def interrupted(self, what: str, line: str) -> None:
        self.interruptions.append(f"{what} at {line}")

    def broken(self, what: str, line: str) -> None:
        """The graph ends before the function does."""
        if self.must_be_whole:
            raise GraphBreakError(f"full_graph=True, but {what}, which ends the graph before the function, at {line}")
        self.interrupted(what, line)

    def uploaded(self, tensor: torch.Tensor, value: Value) -> None:
        self.uploads[id(value.buffer)] = (tensor, value)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(args[1:]) or kwargs:
            self.interruptions.append(f"{type(optimizer).__name__}.step was given a closure")
            return
        initialize_state_of_step(optimizer)
        with state.lock:
            try:
                shadow = Shadow(optimizer)
                node, floats = shadow.step()
            except Unlike as error:
                self.interruptions.append(f"{type(optimizer).__name__}: {error}")
                return
            self._open[id(optimizer)] = (shadow, node, floats, state.trace.node, len(state.trace.floats))

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        opened = self._open.pop(id(optimizer), None)
        if opened is None:
            return
        shadow, shadow_end, shadow_floats, start, first = opened
        with state.lock:
            nodes = _with_floats(state.trace.node.path()[len(start.path()) :])
            floats = state.trace.floats[first:]
        try:
            section = Section(nodes, floats, _with_floats(shadow_end.path()), shadow_floats)
            section.end = shadow_end
        except Unlike as error:
            self.interruptions.append(f"{type(optimizer).__name__}: {error}")
            return
        if not shadow.follows():
            self.interruptions.append(f"{type(optimizer).__name__}: its state is not the same for all parameters")
        if id(optimizer) in self.shadows:
            self.interruptions.append(f"{type(optimizer).__name__} makes several updates")
        self.shadows[id(optimizer)] = shadow
        self.sections.append((shadow, start, first, section))


def _with_floats(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if node.operation.num_floats]


def _host_generators() -> list[Any]:
    return [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]


@contextlib.contextmanager
def whole_graph() -> Iterator[None]:
    """A block in which what would end the graph raises `GraphBreakError`."""
    before, state.observer = state.observer, _Watch(must_be_whole=True)
    try:
        yield
    finally:
        state.observer = before


def observe(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    roots: dict[str, Any],
    *,
    full_graph: bool = False,
) -> Observation:
    """Run `function`, with the sync before and after it that makes it one program, and tell what it did.

    What the function raises, comes through; with `full_graph` also a `GraphBreakError`.
    """
    run_pending(STEP_BEGINS)
    with collector_paused():
        before = Snapshot(roots)
    arguments = flattened((args, kwargs))[0]
    given = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
    on_host = _host_contents(given)
    reads = HostReads(given)
    watch = _Watch(full_graph)
    generators = _host_generators()
    contents = _contents(before, given)
    hooks = (
        register_optimizer_step_pre_hook(watch.before_step),
        register_optimizer_step_post_hook(watch.after_step),
    )
    trace = state.trace
    state.observer = watch
    try:
        with state.lazy_region(), reads if on_host else contextlib.nullcontext():
            result = function(*args, **kwargs)
        leaves, pending, floats, ints = list(trace.leaves), list(trace.pending), list(trace.floats), list(trace.ints)
    finally:
        state.observer = None
        for hook in hooks:
            hook.remove()
    program = run_pending(STEP_ENDS)
    seen = Observation(result, floats=floats, ints=ints, draws=trace.random_draws, node=trace.node, program=program)
    seen.reasons += before.opaque + watch.interruptions + opaque_arguments(arguments)
    _find_host_reads(seen, given, on_host, reads.read)
    if program is None and not seen.reasons:
        seen.reasons.append("it recorded nothing")
    if _host_generators() != generators:
        seen.reasons.append("it drew random numbers from Python, NumPy or torch's CPU generator")
    if not seen.reasons:
        with collector_paused():
            _describe(seen, before, contents, given, watch, leaves, pending)
    return seen


def _host_contents(given: list[torch.Tensor]) -> dict[int, torch.Tensor | None]:
    """Copies of the CPU tensors among the arguments, None for large ones."""
    return {
        index: tensor.detach().clone() if tensor.numel() * tensor.element_size() <= MAX_CONSTANT_BYTES else None
        for index, tensor in enumerate(given)
        if not _is_on_device(tensor)
    }


def _find_host_reads(
    seen: Observation, given: list[torch.Tensor], before: dict[int, torch.Tensor | None], read: set[int]
) -> None:
    for index in sorted(read):
        contents = before[index]
        if contents is None:
            seen.reasons.append(f"it reads a CPU tensor {list(given[index].shape)} among its arguments on the host")
        elif not torch.equal(contents, given[index]):
            seen.reasons.append(f"it changes a CPU tensor {list(given[index].shape)} among its arguments")
        else:
            seen.read_on_host[index] = contents


@dataclass
class _Contents:
    """What the places and arguments held before the call.

    Buffers are kept, so that their ids stay theirs; values are not, since one that is kept is not donated.
    """

    by_buffer: dict[int, tuple[Any, list[Origin]]]
    by_storage: dict[int, tuple[StorageData, Any]]


def _contents(snapshot: Snapshot, given: list[torch.Tensor]) -> _Contents:
    found = _Contents({}, {})
    tensors = [(Origin("argument", index), tensor) for index, tensor in enumerate(given) if _is_on_device(tensor)]
    tensors += [(Origin("cell", key), cell.tensor) for key, cell in snapshot.cells.items()]
    for origin, tensor in tensors:
        data = storage_data(tensor)
        if id(data) not in found.by_storage:
            buffer = None if data.value is None else data.value.buffer
            found.by_storage[id(data)] = (data, buffer)
            if buffer is not None:
                found.by_buffer.setdefault(id(buffer), (buffer, []))[1].append(origin)
    return found


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "xla"


def _describe(
    seen: Observation,
    before: Snapshot,
    contents: _Contents,
    given: list[torch.Tensor],
    watch: _Watch,
    leaves: list[DeviceData],
    pending: list[Any],
) -> None:
    """Fill in all that a plan needs, or the reasons why there can be none."""
    after = seen.snapshot = Snapshot(before.roots)
    seen.reasons += after.opaque + list(before.changes(after))
    seen.shadows = watch.shadows
    seen.settings = [setting for shadow in watch.shadows.values() for setting in shadow.settings()]
    seen.sections = [(first, len(section.source), section) for _, _, first, section in watch.sections]
    _find_sources(seen, contents, given, watch, leaves)
    slots = {id(value): value.slot for value in (ref() for ref in pending) if value is not None}
    handed = {id(leaf.buffer): index for index, leaf in enumerate(leaves)}

    def origin(value: Value | None) -> Origin | None:
        if value is not None and id(value) in slots:
            return Origin("output", value.slot)
        if value is not None and id(value.buffer) in handed:
            return Origin("leaf", handed[id(value.buffer)])
        return None

    used = _find_effects(seen, contents, before, after, given, origin)
    used |= _find_results(seen, contents, after, given, origin)
    unknown = set(slots.values()) - used
    if unknown and seen.node is not None:
        node = _node_of(seen.node, min(unknown))
        seen.reasons.append(
            f"something that cannot be found from it keeps a value it computed: {node.operation.name} at {node.line}"
        )


def _node_of(end: Node, slot: int) -> Node:
    return next(node for node in end.path() if node.num_slots > slot)


def _find_sources(
    seen: Observation, contents: _Contents, given: list[torch.Tensor], watch: _Watch, leaves: list[DeviceData]
) -> None:
    hosts = {_host_identity(tensor): i for i, tensor in enumerate(given) if not _is_on_device(tensor)}
    for position, leaf in enumerate(leaves):
        known = contents.by_buffer.get(id(leaf.buffer))
        if known is not None:
            seen.sources.append(known[1])
            continue
        uploaded = watch.uploads.get(id(leaf.buffer))
        if uploaded is None:
            seen.reasons.append(f"it reads a tensor that cannot be found from it, of shape {list(leaf.buffer.shape)}")
            return
        tensor = uploaded[0]
        if _host_identity(tensor) in hosts:
            seen.sources.append([Origin("upload", hosts[_host_identity(tensor)])])
            continue
        if tensor.numel() * tensor.element_size() > MAX_CONSTANT_BYTES:
            seen.reasons.append(f"it copies a CPU tensor {list(tensor.shape)} to the device; pass it as an argument")
            return
        seen.constants[position] = (tensor.detach().clone(), uploaded[1])
        seen.sources.append([Origin("constant", position)])


def _host_identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


Find = Callable[[Value | None], Origin | None]


def _find_effects(
    seen: Observation, contents: _Contents, before: Snapshot, after: Snapshot, given: list[torch.Tensor], origin: Find
) -> set[int]:
    """Storages with another value than before, and places with another tensor; returns the slots that are used."""
    used: set[int] = set()
    places = [(Origin("argument", index), tensor) for index, tensor in enumerate(given) if _is_on_device(tensor)]
    places += [(Origin("cell", key), cell.tensor) for key, cell in before.cells.items()]
    done: set[int] = set()
    for place, tensor in places:
        data = storage_data(tensor)
        if id(data) in done:
            continue
        done.add(id(data))
        if (None if data.value is None else data.value.buffer) is contents.by_storage[id(data)][1]:
            continue
        found = origin(data.value)
        if found is None:
            seen.reasons.append(f"{_cell_name(before, place)} is given contents that the step did not compute")
            continue
        seen.updates.append((place, found))
        used |= {found.key} if found.kind == "output" else set()
    place_of = {id(tensor): place for place, tensor in places}
    fresh: dict[int, tuple[StorageData, torch.Tensor, list[Any]]] = {}
    for key, cell in after.cells.items():
        tensor, old = cell.tensor, before.cells.get(key)
        if old is not None and old.tensor is tensor:
            continue
        if id(tensor) in place_of:
            seen.moved.append((key, place_of[id(tensor)]))
            continue
        data = storage_data(tensor)
        known = fresh.setdefault(id(data), (data, tensor, []))
        known[2].append(key)
        if known[1] is not tensor or id(data) in contents.by_storage or not _can_be_made(tensor, data):
            seen.reasons.append(f"{cell.path} is given a view of another tensor")
    for data, tensor, keys in fresh.values():
        found = origin(data.value)
        if found is None:
            seen.reasons.append(f"{after.cells[keys[0]].path} is given a tensor that the step did not compute")
            continue
        seen.rebound.append((tuple(keys), found, _geometry(tensor, data), tensor.requires_grad and tensor.is_leaf))
        used |= {found.key} if found.kind == "output" else set()
    return used


def _cell_name(snapshot: Snapshot, place: Origin) -> str:
    return snapshot.cells[place.key].path if place.kind == "cell" else f"argument {place.key}"


def _can_be_made(tensor: torch.Tensor, data: StorageData) -> bool:
    """Whether a tensor can be made from its storage's contents alone."""
    return (
        data.value is not None and data.value.spec.dtype is tensor.dtype and not (tensor.is_neg() or tensor.is_conj())
    )


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a view must share with its base to be made by sizes and strides alone."""
    return tensor.dtype, tensor.is_neg(), tensor.is_conj()


def _geometry(tensor: torch.Tensor, data: StorageData) -> Geometry | None:
    """How a tensor looks at its storage; None if it is all of it, in order."""
    assert data.value is not None
    if data.value.spec.shape == tuple(tensor.shape) and tensor.is_contiguous():
        return None
    return Geometry(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _find_results(
    seen: Observation, contents: _Contents, after: Snapshot, given: list[torch.Tensor], origin: Find
) -> set[int]:
    used: set[int] = set()
    leaves, seen.result_tree = tree_flatten(seen.result)
    cells: dict[int, Cell] = {id(cell.tensor): cell for cell in after.cells.values()}
    keys = {id(cell): key for key, cell in after.cells.items()}
    kept = [(Origin("argument", index), tensor) for index, tensor in enumerate(given) if _is_on_device(tensor)]
    kept += [(Origin("cell", key), cell.tensor) for key, cell in after.cells.items()]
    place_of = {id(storage_data(tensor)): (place, tensor) for place, tensor in reversed(kept)}
    own: dict[int, int] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            if not (leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes)):
                seen.reasons.append(f"it returns a {type(leaf).__name__}, into which replay does not look")
            seen.outputs.append(Origin("value", leaf))
        elif not _is_on_device(leaf):
            seen.reasons.append("it returns a tensor on the CPU")
        elif id(leaf) in cells:
            seen.outputs.append(Origin("cell", keys[id(cells[id(leaf)])]))
        elif any(leaf is tensor for tensor in given):
            seen.outputs.append(Origin("argument", next(i for i, tensor in enumerate(given) if leaf is tensor)))
        else:
            data = storage_data(leaf)
            index = len(seen.outputs)
            is_kept = id(data) in place_of
            # A view of a parameter that was made without recording gradients requires one by its base.
            if not seen.sections and (leaf.grad_fn is not None if is_kept else leaf.requires_grad):
                seen.reasons.append("it returns a tensor that requires a gradient, and makes no update itself")
            if is_kept:
                place, tensor = place_of[id(data)]
                if _kind_of(leaf) != _kind_of(tensor):
                    seen.reasons.append(f"it returns a view of another dtype, of shape {list(leaf.shape)}")
                seen.outputs.append(Origin("view", place))
                seen.geometries[index] = Geometry(tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()))
                continue
            found = origin(data.value)
            if found is None or not _can_be_made(leaf, data):
                seen.reasons.append(f"it returns a tensor of shape {list(leaf.shape)} that it did not compute")
                continue
            first = own.setdefault(id(data), index)
            if first != index:
                seen.views[index] = first
            seen.outputs.append(found)
            seen.geometries[index] = _geometry(leaf, data)
            used |= {found.key} if found.kind == "output" else set()
    return used
