"""What is recorded: plain data, hashing and a text form. Knows nothing of tensors, lowerings or programs.

A **Trace** is the list of operators recorded since the last sync. Each entry is a **Node**: an `Operation` and the
slots of its operands. A slot is the number of a value within the trace: leaves (**DeviceData**, numbered at first use)
and node outputs count together. Python numbers that may change are not part of a node: they are appended to the trace's
`floats` and `ints`, which the program takes as inputs.

Nodes are shared between traces: they form a tree in which every trace is a path from the root. Recording an operator
that was recorded at this place before is one dictionary look-up, the node where a trace ends is the identity of what
was recorded (no hash of the whole), and the user's line is looked up only where a trace leaves all the known paths.

May import: dtypes, errors.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch

from xlatrainer.backend.dtypes import note_held, policy

__all__ = ["DeviceData", "Node", "Operation", "Spec", "Trace", "Value", "device_data", "make_spec"]


class Spec:
    """Shape and dtype of a value. Interned by `make_spec`: equal specs are the same object.

    `dtype` is that of the tensors, `held` that of the numbers on the device: another one under a precision policy.
    """

    __slots__ = ("dtype", "held", "leaf", "numel", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, held: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self.held = held
        self.numel = math.prod(shape)
        self.leaf: Operation | None = None

    def __repr__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if self.held is not self.dtype:
            name += f" as {str(self.held).removeprefix('torch.')}"
        return f"{name}[{','.join(map(str, self.shape))}]"


_specs: dict[tuple[tuple[int, ...], torch.dtype, torch.dtype], Spec] = {}


def make_spec(shape: tuple[int, ...], dtype: torch.dtype, held: torch.dtype | None = None) -> Spec:
    """The one `Spec` of this shape and dtype. `held` defaults to what the precision policy says now."""
    if held is None:
        held = policy().held.get(dtype, dtype)
    key = (shape, dtype, held)
    found = _specs.get(key)
    if found is None:
        if held is not dtype:
            note_held(dtype)
        found = _specs[key] = Spec(tuple(int(size) for size in shape), dtype, held)
    return found


class Value:
    """One output of one node, or data on the device: immutable once computed.

    `buffer` is the array on the device, None while the value is pending. `slot` is its number within `trace`, which is
    the trace that used it last (a weak link would cost more than it saves: traces are small once they have run).
    `sharding` is a `placement.Sharding`: how the buffer lies on several devices, or how it shall once it is computed;
    None for a buffer on the one device, and for a pending value that may lie in any way.
    """

    __slots__ = ("__weakref__", "buffer", "sharding", "slot", "spec", "trace")

    def __init__(self, spec: Spec, buffer: Any = None, trace: Any = None, slot: int = -1) -> None:
        self.spec = spec
        self.buffer = buffer
        self.sharding: Any = None
        self.trace = trace
        self.slot = slot


class Operation:
    """An ATen operator with everything static about one call of it: shared by all nodes that agree in that.

    Args:
        name: the operator, as torch writes it (`aten::add.Tensor`).
        lower: operands, lifted numbers and random key to JAX arrays, one for each of `outputs`; None for a leaf.
        outputs: specs of the results, in order; results that are None are left out.
        num_floats: Python floats that a call appends to the trace's floats.
        num_ints: the same for ints.
        random: true if the operator draws random numbers.
        detail: the static arguments, for people.
        identity: a text that, with the name, says everything static, the same in every process; None if there is none.
        sharding: of a leaf on several devices its `placement.Sharding`, and what a constraint asks for.
    """

    __slots__ = ("detail", "identity", "lower", "name", "num_floats", "num_ints", "outputs", "random", "sharding")

    def __init__(
        self,
        name: str,
        lower: Callable[..., tuple[Any, ...]] | None,
        outputs: tuple[Spec, ...],
        *,
        num_floats: int = 0,
        num_ints: int = 0,
        random: bool = False,
        detail: str = "",
        identity: str | None = None,
        sharding: Any = None,
    ) -> None:
        self.name = name
        self.lower = lower
        self.outputs = outputs
        self.num_floats = num_floats
        self.num_ints = num_ints
        self.random = random
        self.detail = detail
        self.identity = identity
        self.sharding = sharding

    def __repr__(self) -> str:
        return f"{self.name}({self.detail})" if self.detail else self.name


def device_data(spec: Spec) -> Operation:
    """The operation of a leaf of this spec."""
    if spec.leaf is None:
        spec.leaf = Operation("xla::device_data", None, (spec,), identity=repr(spec))
    return spec.leaf


class DeviceData(NamedTuple):
    """A leaf of a trace. The buffer is captured when it is recorded: its value may be overwritten before the sync.

    `value` is weak: when nothing but the trace needs the old value any more, its buffer can be donated.
    """

    value: "weakref.ref[Value]"
    buffer: Any


class Node:
    """One operation at its place in the tree of all traces; see the module's text."""

    __slots__ = ("children", "line", "num_slots", "operands", "operation", "parent", "programs", "scope")

    def __init__(
        self,
        parent: "Node | None",
        operation: Operation,
        operands: tuple[int, ...],
        num_slots: int,
        line: str,
        scope: str = "",
    ) -> None:
        self.parent = parent
        self.operation = operation
        self.operands = operands
        self.num_slots = num_slots  # of the trace, up to and with this node
        self.line = line
        self.scope = scope  # of modules and named blocks, with slashes between them, if it was asked for
        self.children: dict[tuple[Any, ...], Node] = {}
        self.programs: list[Any] = []  # compiled programs of the traces that ended here

    def path(self) -> list["Node"]:
        """The nodes from the first recorded to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def text(self) -> Iterator[str]:
        """One line a node: `%3 = aten::add.Tensor(%0, %1) : float32[2,2]  # file.py:10`."""
        for node in self.path():
            first = node.num_slots - len(node.operation.outputs)
            names = ", ".join(f"%{first + i}" for i in range(len(node.operation.outputs)))
            operands = ", ".join(f"%{slot}" for slot in node.operands)
            detail = f" {{{node.operation.detail}}}" if node.operation.detail else ""
            results = ", ".join(map(repr, node.operation.outputs))
            yield f"{names} = {node.operation.name}({operands}){detail} : {results}  # {node.line}"


_ref = weakref.ref  # looked up once: it is called for every value

ROOT_OPERATION = Operation("xla::root", None, ())


def make_root() -> Node:
    """The start of an empty tree."""
    return Node(None, ROOT_OPERATION, (), 0, "")


class Trace:
    """What has been recorded since the last sync, at `node` of the tree."""

    __slots__ = (
        "began",
        "extend",
        "floats",
        "home",
        "ints",
        "leaves",
        "move",
        "node",
        "num_nodes",
        "num_slots",
        "overwritten",
        "pending",
        "random_draws",
        "views",
    )

    def __init__(
        self,
        root: Node,
        extend: Callable[[Node, Operation, tuple[Any, ...], int], Node],
        home: Any = None,
        move: Callable[[Value, Any], None] | None = None,
    ) -> None:
        self.node = root
        self.extend = extend  # makes a node where the trace leaves the known paths
        self.home = home  # a `placement.Home`: the devices that the program will run on; None: the one device
        self.move = move  # brings a value to `home`
        self.num_slots = 0
        self.num_nodes = 0
        self.began = 0.0  # `time.perf_counter()` at the first operator
        self.leaves: list[DeviceData] = []
        self.floats: list[float] = []
        self.ints: list[int] = []
        self.pending: list[weakref.ref[Value]] = []
        # storages, with what they held before: spec, buffer, sharding
        self.overwritten: list[tuple[weakref.ref[Any], Spec, Any, Any]] = []
        self.random_draws = 0
        self.views: dict[Any, Value] = {}  # (root value, geometry) -> the value read through it

    def slot_of(self, value: Value) -> int:
        """The slot of a value, which becomes a leaf if this trace has not met it yet."""
        if value.trace is self:
            return value.slot
        if value.buffer is None:
            raise RuntimeError("internal error: a pending value of an earlier trace was never computed")
        slot = self.num_slots
        sharding = value.sharding
        if (sharding.home if sharding is not None else None) is not self.home and self.move is not None:
            self.move(value, self.home)
            sharding = value.sharding
        token = (device_data(value.spec) if sharding is None else sharding.leaf(value.spec),)
        child = self.node.children.get(token)
        self.num_slots = slot + 1
        self.node = child if child is not None else self.extend(self.node, token[0], token, slot + 1)
        self.leaves.append(DeviceData(_ref(value), value.buffer))
        value.trace = self
        value.slot = slot
        return slot

    def append(self, token: tuple[Any, ...]) -> list[Value]:
        """Record `(operation, operand slots...)`; returns one pending value for each output."""
        operation: Operation = token[0]
        outputs = operation.outputs
        slot = self.num_slots
        if len(outputs) == 1:  # as of almost every operator: a loop over one costs more than the value
            value = Value(outputs[0], None, self, slot)
            self.pending.append(_ref(value))
            values = [value]
            slot += 1
        else:
            values = []
            for spec in outputs:
                value = Value(spec, None, self, slot)
                self.pending.append(_ref(value))
                values.append(value)
                slot += 1
        self.num_slots = slot
        if not self.num_nodes:
            self.began = perf_counter()
        self.num_nodes += 1
        if operation.random:
            self.random_draws += 1
        child = self.node.children.get(token)
        self.node = child if child is not None else self.extend(self.node, operation, token, slot)
        return values
