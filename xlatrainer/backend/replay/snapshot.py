"""The Python state that a function can reach: what it holds, which tensors are in it, whether it changed.

A `Snapshot` walks from its roots through attributes, containers, closures and, for functions outside installed
libraries, the globals that their code names. Tensors of the device are **cells**: their contents are data, and a place
that is given another tensor in every step (`self.total = self.total + x`) may go on doing so. Everything else must stay
what it was, or the step must run its Python again.

What cannot be watched (an iterator, a generator, a large NumPy array) is named in `opaque`.

May import: source, torch, numpy.
"""

import enum
import random
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch

from xlatrainer.backend.source import is_own_code

__all__ = ["Cell", "Snapshot", "layout_of", "same"]

MAX_OBJECTS = 200_000  # reachable from one function; more take too long to watch
MAX_ARRAY_BYTES = 65_536  # of a NumPy array that is compared at every replay

_ATOMS = (
    bool, int, float, complex, str, bytes, range, slice, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, types.BuiltinFunctionType, types.ModuleType, types.CodeType, types.GenericAlias,
)  # fmt: skip
_CONTAINERS = (tuple, list, dict, set, frozenset, deque)
_COUNTED = (list, dict, set, deque)
_CAUGHT_IN_C = (types.MethodWrapperType, types.WrapperDescriptorType, types.GetSetDescriptorType, property)
_NO_STATE = frozenset({"logging", "threading", "_thread", "weakref", "re", "inspect", "typing", "abc", "contextvars"})


class Cell:
    """A place that holds a tensor of the device: `tensor` is what it held when it was looked at last.

    Whatever it holds looks at its storage in one way, `layout`, or the step records something else.
    """

    __slots__ = ("device", "index", "key", "layout", "owner", "path", "place", "position", "tensor")

    def __init__(self, place: "_Place", index: int, tensor: torch.Tensor) -> None:
        self.place = place
        self.index = index  # in the place's contents
        self.owner = place.owner
        self.key = place.keys[index]
        self.path = place.name(self.key)
        self.tensor = tensor
        self.layout = layout_of(tensor)
        self.position = -1  # in the snapshot's flat list of contents
        self.device = -1  # of the tensor among the snapshot's, if no other way leads to it

    def rebind(self, tensor: torch.Tensor) -> None:
        """Let the place hold another tensor."""
        owner = self.owner
        if isinstance(owner, dict | list | deque):
            owner[self.key] = tensor
        elif isinstance(owner, _Globals):
            owner.names[self.key] = tensor
        elif isinstance(owner, types.CellType):
            owner.cell_contents = tensor
        else:
            setattr(owner, self.key, tensor)
        self.tensor = tensor


class _Place:
    """One container found by the walk: its keys and contents at that time."""

    __slots__ = ("contents", "keys", "owner", "path")

    def __init__(self, owner: Any, path: str, keys: tuple[Any, ...], contents: Iterable[Any]) -> None:
        self.owner = owner
        self.path = path
        self.keys = keys
        self.contents = list(contents)

    def name(self, key: Any) -> str:
        if isinstance(self.owner, dict | list | deque):
            return f"{self.path}.{key}" if isinstance(key, str) else f"{self.path}[{_short(key)}]"
        return f"{self.path}.{key}"


def _short(key: Any) -> str:
    return f"tensor{list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)[:40]


def same(left: Any, right: Any) -> bool:
    """Whether two contents of one place are the same for a function that reads them: identical, or equal plain data."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, _ATOMS):
        return bool(left == right) or (left != left and right != right)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(map(same, left.values(), right.values()))
    if isinstance(left, set | frozenset):
        return left == right
    return isinstance(left, types.MethodType) and left.__func__ is right.__func__ and left.__self__ is right.__self__


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor looks at its storage."""
    return (
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _stands_in_for(new: Any, cell: Cell) -> bool:
    """Whether `new` is a tensor that a cell may hold instead of its own, and nothing but a tensor."""
    old = cell.tensor
    if type(new) is not torch.Tensor or type(old) is not torch.Tensor or new.requires_grad or old.requires_grad:
        return False
    return new.device == old.device and layout_of(new) == cell.layout and not new.__dict__ and not old.__dict__


def _is_device_tensor(content: Any) -> bool:
    return isinstance(content, torch.Tensor) and content.device.type == "xla"


class Snapshot:
    """The state reachable from `roots`, at the time of its making.

    Args:
        roots: what the function is made of, by the names used in messages.

    Attributes:
        cells: the places that hold device tensors, by (id of the owner, key).
        optimizers: optimizers found. Their hyperparameters and the host's part of their state (step counts) are not
            watched here: see `optimizers`.
        opaque: what cannot be watched, in words; replay is impossible if there is any.
        contents: of all places, one after the other; a cell's stand at its `position`.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self.roots = roots
        self.cells: dict[tuple[int, Any], Cell] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.opaque: list[str] = []
        self._places: list[_Place] = []
        self._devices: list[torch.Tensor] = []
        self._ways: Counter[int] = Counter()  # that lead to each tensor, by its id
        self._adopted: dict[Cell, _Place] = {}  # attributes of tensors that others have put into cells
        self._hosts: list[torch.Tensor] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], str]] = []
        self._generators: list[tuple[Callable[[], Any], Any, str]] = []
        self._walk()
        self._freeze()

    # walking

    def _walk(self) -> None:
        seen: set[int] = set()
        pending: list[tuple[Any, str]] = [(root, name) for name, root in reversed(self.roots.items())]
        while pending:
            item, path = pending.pop()
            if isinstance(item, torch.Tensor):
                self._ways[id(item)] += 1
            if item is None or isinstance(item, _ATOMS) or id(item) in seen:
                continue
            seen.add(id(item))
            if len(seen) > MAX_OBJECTS:
                self.opaque.append(f"more than {MAX_OBJECTS} objects are reachable from it")
                return
            pending.extend(reversed(list(self._look_into(item, path))))

    def _look_into(self, item: Any, path: str) -> Iterator[tuple[Any, str]]:
        """Note what `item` is; yields what it leads to."""
        if isinstance(item, torch.Tensor):
            yield from self._tensor(item, path)
        elif isinstance(item, torch.optim.Optimizer):
            yield from self._optimizer(item, path)
        elif isinstance(item, _CONTAINERS):
            yield from self._container(item, path)
        elif isinstance(item, types.FunctionType):
            yield from self._function(item, path)
        elif isinstance(item, types.MethodType):
            yield item.__self__, path
            yield item.__func__, path
        elif isinstance(item, partial):
            yield from ((item.func, path), (item.args, path), (item.keywords, path))
        elif isinstance(item, type):
            yield from self._class(item, path)
        else:
            yield from self._object(item, path)

    def _place(self, owner: Any, path: str, keys: tuple[Any, ...], contents: tuple[Any, ...]) -> _Place:
        place = _Place(owner, path, keys, contents)
        self._places.append(place)
        for index, (key, content) in enumerate(zip(keys, contents, strict=True)):
            if _is_device_tensor(content):
                self.cells[_identity(owner, key)] = Cell(place, index, content)
        return place

    def _tensor(self, tensor: torch.Tensor, path: str) -> Iterator[tuple[Any, str]]:
        if tensor.device.type != "xla":
            self._hosts.append(tensor)
            return
        self._devices.append(tensor)
        if tensor.is_leaf and tensor.requires_grad:
            grad = tensor.grad
            self._place(tensor, path, ("grad",), (grad,))
            yield grad, f"{path}.grad"
        yield tensor.__dict__, path

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> Iterator[tuple[Any, str]]:
        self.optimizers.append(optimizer)
        watched = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults")}
        self._place(vars(optimizer), path, tuple(vars(optimizer)), tuple(vars(optimizer).values()))
        yield from ((value, f"{path}.{key}") for key, value in watched.items())
        groups = optimizer.param_groups
        self._place(groups, f"{path}.param_groups", tuple(range(len(groups))), tuple(groups))
        for index, group in enumerate(groups):
            name = f"{path}.param_groups[{index}]"
            tensors = {key: value for key, value in group.items() if isinstance(value, torch.Tensor)}
            self._place(group, name, tuple(tensors), tuple(tensors.values()))
            yield group["params"], f"{name}.params"
            yield from ((value, f"{name}.{key}") for key, value in tensors.items())
        self._place(optimizer.state, f"{path}.state", tuple(optimizer.state), tuple(optimizer.state.values()))
        for parameter, state in optimizer.state.items():
            on_device = {key: value for key, value in state.items() if _is_device_tensor(value)}
            name = f"{path}.state[{_short(parameter)}]"
            self._place(state, name, tuple(on_device), tuple(on_device.values()))
            yield from ((value, name) for value in on_device.values())

    def _container(self, item: Any, path: str) -> Iterator[tuple[Any, str]]:
        if isinstance(item, dict):
            place = self._place(item, path, tuple(item), tuple(item.values()))
            yield from ((key, path) for key in item if isinstance(key, torch.Tensor | tuple))
        elif isinstance(item, list | deque):
            place = self._place(item, path, tuple(range(len(item))), tuple(item))
        elif isinstance(item, tuple | frozenset):
            yield from ((content, f"{path}[{index}]") for index, content in enumerate(item))
            return
        else:
            place = self._place(item, path, tuple(range(len(item))), tuple(item))
        yield from ((content, place.name(key)) for key, content in zip(place.keys, place.contents, strict=True))

    def _function(self, function: types.FunctionType, path: str) -> Iterator[tuple[Any, str]]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self._place(cell, path, (name,), (content,))
            yield content, name
        yield function.__defaults__, path
        yield function.__kwdefaults__, path
        if function.__dict__:
            yield function.__dict__, path
        if is_own_code(function.__code__.co_filename):
            names = tuple(n for n in _names_in(function.__code__) if n in function.__globals__)
            contents = tuple(function.__globals__[name] for name in names)
            self._place(_Globals(function.__globals__), path, names, contents)
            yield from zip(contents, names, strict=True)

    def _class(self, cls: type, path: str) -> Iterator[tuple[Any, str]]:
        """What a class of the user's holds for all its objects."""
        if not _is_users_class(cls):
            return
        data = {k: v for k, v in vars(cls).items() if not k.startswith("__") and not isinstance(v, _CAUGHT_IN_C)}
        self._place(cls, path, tuple(data), tuple(data.values()))
        for key, value in data.items():
            yield (value.__func__ if isinstance(value, staticmethod | classmethod) else value), f"{path}.{key}"

    def _object(self, item: Any, path: str) -> Iterator[tuple[Any, str]]:
        if isinstance(item, np.ndarray):
            if item.nbytes > MAX_ARRAY_BYTES:
                self.opaque.append(f"{path} is a NumPy array of {item.nbytes} bytes; a tensor can be watched")
            else:
                self._arrays.append((item, item.copy(), path))
            return
        read = _state_reader(item)
        if read is not None:
            self._generators.append((read, read(), path))
            return
        if isinstance(item, Iterator):
            self.opaque.append(f"{path} is an iterator ({type(item).__name__}), whose position cannot be seen")
            return
        cls = type(item)
        if cls.__module__.partition(".")[0] in _NO_STATE or isinstance(item, _CAUGHT_IN_C):
            return
        # Names of attributes count as names of globals: `optimizer.step()` leads to a compiled function called `step`.
        if hasattr(cls, "watched_roots"):
            yield from ((root, name) for name, root in item.watched_roots().items())
            return
        yield from ((base, base.__name__) for base in cls.__mro__ if _is_users_class(base))
        attributes = getattr(item, "__dict__", None)
        if isinstance(attributes, dict):
            # An object made for torch's `vars(module)` has its parameters in dicts of their own, found like any other.
            self._place(attributes, path, tuple(attributes), tuple(attributes.values()))
            yield from ((value, f"{path}.{key}") for key, value in attributes.items())
        slots = [s for base in cls.__mro__ for s in _slots(base) if hasattr(item, s)]
        if slots and sys.modules.get(cls.__module__) is not None and not _is_c_type(cls):
            contents = tuple(getattr(item, s) for s in slots)
            self._place(item, path, tuple(slots), contents)
            yield from ((value, f"{path}.{key}") for key, value in zip(slots, contents, strict=True))

    # comparing

    def changes(self, after: "Snapshot") -> Iterator[str]:
        """What is not the same in a snapshot made later, in words; cells with another tensor of its kind are."""
        later = {id(place.owner): place for place in after._places if not isinstance(place.owner, _Globals)}
        for place in [*self._places, *self._adopted.values()]:
            now = later.get(id(place.owner))
            if isinstance(place.owner, _Globals):
                now = _Place(place.owner, place.path, place.keys, place.owner.read(place.keys))
            if now is None:
                continue  # unreachable by now, so a place that led to it has changed
            yield from _differences(place, now)
        for key, cell in self.cells.items():
            found = after.cells.get(key)
            if found is not None and found.layout != cell.layout:
                yield f"{cell.path} looks at its contents in another way"
        if len(self._devices) == len(after._devices):
            # As it was then: a parameter that is frozen or not by now is still the same tensor.
            for before, tensor in zip(self._requires_grad, after._devices, strict=True):
                if before != tensor.requires_grad:
                    yield f"requires_grad of a tensor {list(tensor.shape)} changed"
        versions = dict(zip(map(id, self._hosts), self._versions, strict=True))
        for tensor in after._hosts:
            if versions.get(id(tensor), tensor._version) != tensor._version:
                yield f"a CPU tensor {list(tensor.shape)} was changed in place"
        for array, content, path in self._arrays:
            if not np.array_equal(array, content):
                yield f"the NumPy array {path} was changed"
        for read, before, path in self._generators:
            if read() != before:
                yield f"random numbers were drawn from {path}"

    def _freeze(self) -> None:
        """Lay the contents of all places out flat, for `is_unchanged`."""
        self._empty = [p.owner for p in self._places if isinstance(p.owner, _COUNTED) and not p.owner]  # hooks, mostly
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] = []  # of the dicts
        self._lists: list[Any] = []
        self._with_grad: list[torch.Tensor] = []
        self._single: list[tuple[Any, Any]] = []
        expected: list[Any] = []
        by_kind: tuple[list[_Place], ...] = ([], [], [], [])
        for place in self._places:
            partial_dict = isinstance(place.owner, dict) and len(place.keys) != len(place.owner)
            if isinstance(place.owner, _COUNTED) and not place.owner:
                continue
            if isinstance(place.owner, dict) and not partial_dict:
                by_kind[0].append(place)
            elif isinstance(place.owner, list | deque | set):
                by_kind[1].append(place)
            elif isinstance(place.owner, torch.Tensor):
                by_kind[2].append(place)
            elif place.keys:
                by_kind[3].append(place)
        index_of = {id(tensor): index for index, tensor in enumerate(self._devices)}
        for kind, places in enumerate(by_kind):
            for place in places:
                if kind == 0:
                    self._dicts.append(place.owner)
                    self._keys += place.keys
                elif kind == 1:
                    self._lists.append(place.owner)
                elif kind == 2:
                    self._with_grad.append(place.owner)
                for key, content in zip(place.keys, place.contents, strict=True):
                    if kind == 3:
                        self._single.append((place.owner, key))
                    cell = self.cells.get(_identity(place.owner, key))
                    if cell is not None:
                        cell.position = len(expected)
                        cell.device = index_of[id(content)] if self._ways[id(content)] == 1 else -1
                    expected.append(content)
        self.contents = expected
        self._requires_grad = [tensor.requires_grad for tensor in self._devices]
        self._versions = [tensor._version for tensor in self._hosts]

    def is_unchanged(self) -> bool:
        """Whether every place holds what it held: the same objects, compared without calling any of them."""
        now = self._contents_now()
        return (
            len(now) == len(self.contents)
            and all(map(is_, now, self.contents))
            and all(map(is_, chain.from_iterable(self._dicts), self._keys))
            and not any(self._empty)
            and not any(place.owner for place in self._adopted.values())
            and [tensor.requires_grad for tensor in self._devices] == self._requires_grad
            and (not self._hosts or [tensor._version for tensor in self._hosts] == self._versions)
            and all(np.array_equal(array, content) for array, content, _ in self._arrays)
        )

    def _contents_now(self) -> list[Any]:
        return [
            *chain.from_iterable(map(dict.values, self._dicts)),
            *chain.from_iterable(self._lists),
            *[tensor.grad for tensor in self._with_grad],
            *[_content(owner, key) for owner, key in self._single],
        ]

    def adopt(self) -> bool:
        """Take over the tensors that somebody has put into cells, if nothing else has changed; whether that is so.

        A metric that begins anew does so: that is not worth a walk. Only plain tensors are taken over, each of them new
        here, in a place that held one which no other way led to.
        """
        now = self._contents_now()
        if len(now) != len(self.contents):
            return False
        cells = {cell.position: cell for cell in self.cells.values()}
        changed = [i for i, (new, old) in enumerate(zip(now, self.contents, strict=True)) if new is not old]
        if not all(i in cells and cells[i].device >= 0 and _stands_in_for(now[i], cells[i]) for i in changed):
            return False
        known = {*map(id, self._devices), *(id(cell.tensor) for cell in cells.values())}
        if len({id(now[i]) for i in changed} - known) < len(changed):
            return False
        for i in changed:
            self._hold(cells[i], now[i])
            self._adopted[cells[i]] = _Place(now[i].__dict__, cells[i].path, (), ())
        return self.is_unchanged()

    def rebind(self, cell: Cell, tensor: torch.Tensor, *, alone: bool = True) -> None:
        """Let a cell hold another tensor, which counts as no change. Nothing here holds on to the old one.

        `alone`: no other place holds it.
        """
        cell.rebind(tensor)
        if not alone:
            cell.device = -1
        self._adopted.pop(cell, None)
        self._hold(cell, tensor)

    def _hold(self, cell: Cell, tensor: torch.Tensor) -> None:
        cell.tensor = cell.place.contents[cell.index] = self.contents[cell.position] = tensor
        if cell.device >= 0:
            self._devices[cell.device] = tensor


class _Globals:
    """Stands for some globals of a module as the owner of a place."""

    __slots__ = ("names",)

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def read(self, keys: tuple[str, ...]) -> Iterator[Any]:
        return (self.names.get(key) for key in keys)


def _identity(owner: Any, key: Any) -> tuple[int, Any]:
    """What a place's content is found by, in this snapshot and in later ones."""
    if isinstance(owner, _Globals):
        return id(owner.names), key
    return id(owner), key if isinstance(key, int | str) else id(key)


def _content(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict):
        return owner.get(key)
    if isinstance(owner, _Globals):
        return owner.names.get(key)
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    if isinstance(owner, type):
        return vars(owner).get(key)
    return getattr(owner, key, None)


def _differences(before: _Place, now: _Place) -> Iterator[str]:
    if len(before.keys) != len(now.keys) or not all(map(same, before.keys, now.keys)):
        yield f"{before.path} has other entries: {len(before.keys)} before, {len(now.keys)} now"
        return
    for key, old, new in zip(before.keys, before.contents, now.contents, strict=True):
        if same(old, new):
            continue
        if _is_device_tensor(old) and _is_device_tensor(new) and old.shape == new.shape and old.dtype == new.dtype:
            continue
        yield f"{before.name(key)} changed from {_text(old)} to {_text(new)}"


def _text(content: Any) -> str:
    if isinstance(content, torch.Tensor):
        return f"a tensor {list(content.shape)}"
    if isinstance(content, _ATOMS) or content is None:
        return repr(content)[:60]
    return f"a {type(content).__name__}"


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_users_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    return is_own_code(file) if file else cls.__module__ == "__main__"


def _is_c_type(cls: type) -> bool:
    return not cls.__flags__ & (1 << 9)  # Py_TPFLAGS_HEAPTYPE: made by a class statement


def _slots(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in names if not name.startswith("__"))


def _state_reader(item: Any) -> Callable[[], Any] | None:
    """A function that reads the state of a generator of random numbers; None for other things."""
    if isinstance(item, random.Random):
        return item.getstate
    if isinstance(item, np.random.Generator):
        return lambda: repr(item.bit_generator.state)
    if isinstance(item, np.random.RandomState):
        return lambda: repr(item.get_state())
    if isinstance(item, torch.Generator):
        return lambda: item.get_state().tolist()
    return None
