"""A step as a program with its inputs and outputs named: what two observations that agree come to.

May import: observation, snapshot, optimizers, executor, tensor, strided, state, ir, _private_api.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from sys import getrefcount
from typing import Any

import jax
import numpy as np
import torch

from xlatrainer.backend._private_api import tree_unflatten
from xlatrainer.backend.executor import Lost, start
from xlatrainer.backend.ir import Spec, Value, make_spec
from xlatrainer.backend.replay.observation import Observation, Origin
from xlatrainer.backend.replay.optimizers import Shadow
from xlatrainer.backend.replay.snapshot import Cell, Snapshot, layout_of
from xlatrainer.backend.state import state
from xlatrainer.backend.strided import Geometry, contiguous_strides
from xlatrainer.backend.tensor import StorageData, from_host, new_tensor, storage_data

__all__ = ["Mismatch", "Plan"]


def _shared(values: Sequence[Any], positions: Iterable[int], unshared: int) -> frozenset[int]:
    """Which of the values have more references than `unshared`: somebody wants to keep the old contents."""
    return frozenset(position for position in positions if getrefcount(values[position]) > unshared)


def _references_when_unshared() -> int:
    """What `getrefcount` says of a Value that only a storage and a list hold: not the same in each Python."""
    spec = make_spec((), torch.float32)
    data = StorageData(Value(spec), spec)
    values = [data.value]
    return next(count for count in range(10) if not _shared(values, [0], count))


_UNSHARED = _references_when_unshared()
_NOTHING = StorageData(None, make_spec((), torch.float32))  # in the place of what is no cell's


class Mismatch(Exception):
    """Something is not as it was observed; the step must run its Python. Raised before anything has changed."""


class Inputs:
    """What a plan's program is to be given.

    Attributes:
        values: of its leaves.
    """

    __slots__ = ("_storages", "values")

    def __init__(self, storages: list[StorageData], values: list[Value]) -> None:
        """`storages` hold the `values`, `_NOTHING` those that no tensor holds."""
        self.values = values
        self._storages = storages

    def are_current(self) -> bool:
        """Whether the storages still hold these values, and none was lost."""
        pairs = zip(self._storages, self.values, strict=True)  # no other list: `_shared` counts the references
        return all(
            (data.value is value or data is _NOTHING) and value.buffer.__class__ is not Lost for data, value in pairs
        )


class Plan:
    """How to run an observed step again.

    Args:
        seen: the observation.
        snapshot: the places that it speaks of, as they are now.
    """

    def __init__(self, seen: Observation, snapshot: Snapshot) -> None:
        assert seen.program is not None
        assert seen.node is not None
        self.seen = seen
        self.program = seen.program
        self.series: dict[int, Any] = {}  # programs of several steps of it, by their number
        specs = [node.operation.outputs[0] for node in seen.node.path() if node.operation.lower is None]
        self._specs: list[Spec] = specs
        self._shardings = [node.operation.sharding for node in seen.node.path() if node.operation.lower is None]
        self._positions = {slot: index for index, slot in enumerate(self.program.outputs)}
        self._floats = np.array(seen.floats, np.float64)  # another array when a number changes: XLA may still read it
        self.ints = np.array(seen.ints, np.int64)
        self._read_on_host = list(seen.read_on_host.items())
        self._donated = [index for index, given in enumerate(self.program.donated) if given]
        self._settings = list(seen.settings)
        self.follow(snapshot)

    def follow(self, snapshot: Snapshot) -> None:
        """Take the places from another snapshot of the same state; raises `Mismatch` if one is missing."""
        self.snapshot = snapshot
        try:
            cells = [[snapshot.cells[o.key] if o.kind == "cell" else o for o in s] for s in self.seen.sources]
            self._sources: list[Cell | Origin] = [choices[0] for choices in cells]
            self._alike = [(choices[0], other) for choices in cells for other in choices[1:]]
            self._from_others = [(i, source) for i, source in enumerate(self._sources) if isinstance(source, Origin)]
            self._positions_of = [s.position if isinstance(s, Cell) else None for s in self._sources]
            in_place = self._find_in_place()
            self._in_place = list(in_place.values())
            self._updates = [
                (snapshot.cells[place.key] if place.kind == "cell" else place, origin)
                for place, origin in self.seen.updates
                if place not in in_place
            ]
            position_of = {place: position for position, places in enumerate(self.seen.sources) for place in places}
            written = [place for place, _ in self.seen.updates]
            self._written = [position_of[place] for place in written if place in position_of]
            self._kept = [  # written, but not read
                snapshot.cells[place.key] if place.kind == "cell" else place
                for place in written
                if place not in position_of
            ]
            at_places = [s for s in self._sources if isinstance(s, Cell) or s.kind == "argument"]
            self._num_storages = len(at_places) + len(self._kept) + 1  # with _NOTHING
            self._rebound = [
                ([snapshot.cells[key] for key in keys], origin, geometry, leaf)
                for keys, origin, geometry, leaf in self.seen.rebound
            ]
            self._moved = [
                (snapshot.cells[key], snapshot.cells[place.key] if place.kind == "cell" else place)
                for key, place in self.seen.moved
            ]
            self._results = [
                snapshot.cells[origin.key] if origin.kind == "cell" else origin for origin in self.seen.outputs
            ]
            self._bases = {
                index: snapshot.cells[origin.key.key] if origin.key.kind == "cell" else origin.key
                for index, origin in enumerate(self.seen.outputs)
                if origin.kind == "view"
            }
        except KeyError:
            raise Mismatch("a tensor that it used is gone") from None

    def _find_in_place(self) -> dict[Origin, tuple[int, int]]:
        """Places whose donated contents are replaced by one output of the same kind: position of leaf and output."""
        position_of = {sources[0]: position for position, sources in enumerate(self.seen.sources)}
        written = Counter(origin for _, origin in self.seen.updates)
        written.update(origin for _, origin, _, _ in self.seen.rebound)
        written.update(origin for origin in self.seen.outputs)
        handed_on = {origin.key for origin in written if origin.kind == "leaf"}
        found = {}
        for place, origin in self.seen.updates:
            position = position_of.get(place)
            if position is None or place.kind != "cell" or origin.kind != "output" or written[origin] != 1:
                continue
            output = self._positions[origin.key]
            donated = self.program.donated[position] and position not in handed_on
            if donated and self.program.specs[output] is self._specs[position]:
                found[place] = (position, output)
        return found

    def run(self, given: list[torch.Tensor], shadows: dict[int, Shadow], found: Inputs) -> Any:
        """Run the step with these tensors among its arguments; returns what the function would have returned.

        `found` are its `inputs`, which are looked for once more if they have changed since.

        Raises:
            Mismatch: if something is not as it was; nothing has happened then.
        """
        if not found.are_current():
            found = self.inputs(given)
        values = found.values
        buffers, copied = self.buffers(values, range(len(values)))
        floats = self.numbers(shadows)
        random = (state.seed, state.random_offset)
        state.random_offset += self.seen.draws
        try:
            results = start(self.program, buffers, floats, self.ints, random)
        except BaseException as error:
            self.distribute(given, values, [Lost.by(error)] * len(self.program.outputs), copied)
            raise
        for shadow in shadows.values():
            shadow.advance()
        if state.reporter is not None:
            state.reporter.executed(self.program, "a compiled function is replayed")
        returned = self.distribute(given, values, results, copied)
        self.program.keep()
        return returned

    def buffers(self, values: list[Value], positions: Sequence[int]) -> tuple[list[Any], frozenset[int]]:
        """The buffers of these leaves, to be given to the program, and which leaves it gets copies of."""
        buffers = [values[position].buffer for position in positions]
        copied = _shared(values, self._donated, _UNSHARED)
        if copied:
            buffers = [
                jax.numpy.copy(buffer) if position in copied else buffer
                for position, buffer in zip(positions, buffers, strict=True)
            ]
        return buffers, copied

    def check_read(self, given: list[torch.Tensor]) -> None:
        """Raise `Mismatch` if an argument that the function reads on the host holds something else than before."""
        for index, contents in self._read_on_host:
            if not torch.equal(contents, given[index]):
                raise Mismatch(f"it reads a CPU tensor {list(contents.shape)}, which held something else before")

    def numbers(self, shadows: dict[int, Shadow]) -> "np.ndarray[Any, Any]":
        """The floats of this step: the shadows record theirs, unless nothing that they depend on has changed."""
        settings = [setting for shadow in shadows.values() for setting in shadow.settings()]
        unchanged = settings == self._settings
        if unchanged and not any(shadow.has_host_state for shadow in shadows.values()):
            return self._floats
        floats = self._floats.copy()
        for shadow, (first, count, section) in zip(shadows.values(), self.seen.sections, strict=True):
            end, given = shadow.step()
            if end is not section.end:
                raise Mismatch("an optimizer's update has other operators than before")
            floats[first : first + count] = [given[position] for position in section.source]
        self._floats = floats
        self._settings = settings
        return self._floats

    def inputs(self, given: list[torch.Tensor]) -> Inputs:
        """The program's leaves, of the kinds that it takes."""
        held = self.snapshot.contents  # what a step costs here is memory that has left the caches: cells are not read
        storages = [
            _NOTHING if position is None else held[position].untyped_storage()._xla for position in self._positions_of
        ]
        for source in compress(self._sources, [data.viewed for data in storages]):
            if isinstance(source, Cell):
                _check_layout(source)
        values: list[Any] = [data.value for data in storages]
        for position, origin in self._from_others:
            values[position] = self._other_input(origin, given)
        for first, other in self._alike:
            if _value_at(first, given) is not _value_at(other, given):
                raise Mismatch("two tensors that held the same contents do so no more")
            if isinstance(other, Cell):
                _check_layout(other)
        self._check_kinds(values)
        self._check_apart(storages, given)
        return Inputs(storages, values)

    def _check_kinds(self, values: list[Any]) -> None:
        """Raise `Mismatch` if the leaves have other shapes, dtypes or shardings than before, or a lost one's error."""
        if None in values or [value.spec for value in values] != self._specs:  # which are interned: identities
            kinds = ((value and value.spec, spec) for value, spec in zip(values, self._specs, strict=True))
            found, wanted = next((found, spec) for found, spec in kinds if found is not spec)
            raise Mismatch(f"a tensor holds {found or 'nothing'}, where it held {wanted}")
        lost = next((value.buffer for value in values if value.buffer.__class__ is Lost), None)
        if lost is not None:
            raise lost.error()
        if [value.sharding for value in values] != self._shardings:
            raise Mismatch("a tensor lies on other devices, or in another way, than before")

    def _check_apart(self, storages: list[StorageData], given: list[torch.Tensor]) -> None:
        """Raise `Mismatch` if a tensor that the step writes has come to share its storage with another one.

        Args:
            storages: of the leaves that are cells, `_NOTHING` for the others.
            given: the tensors among the arguments.
        """
        kept = [storage_data(place.tensor if isinstance(place, Cell) else given[place.key]) for place in self._kept]
        for place, data in zip(self._kept, kept, strict=True):
            if data.viewed and isinstance(place, Cell):
                _check_layout(place)
        for position, origin in self._from_others:
            if origin.kind == "argument":
                storages[position] = storage_data(given[origin.key])
        if len({*storages, *kept, _NOTHING}) == self._num_storages:
            return
        uses = Counter([*storages, *kept])
        if any(uses[data] > 1 for data in [*[storages[position] for position in self._written], *kept]):
            raise Mismatch("a tensor that it writes shares its storage with another one that it uses")

    def argument(self, position: int, given: list[torch.Tensor]) -> Value:
        """The value of a leaf that comes from an argument."""
        origin = self._sources[position]
        assert isinstance(origin, Origin)
        value = self._other_input(origin, given)
        if value is None or value.spec is not self._specs[position] or value.sharding != self._shardings[position]:
            raise Mismatch("an argument holds contents of another kind than before")
        if isinstance(value.buffer, Lost):
            raise value.buffer.error()
        return value

    def _other_input(self, source: Origin, given: list[torch.Tensor]) -> Value | None:
        if source.kind == "argument":
            return storage_data(given[source.key]).value
        if source.kind == "upload":
            return from_host(given[source.key])
        return self.seen.constants[source.key][1]

    def distribute(
        self, given: list[torch.Tensor], values: list[Value], results: list[Any], shared: frozenset[int]
    ) -> Any:
        """Write the outputs where the step would have written them; returns the function's result."""
        shardings = self.program.shardings
        for position, output in self._in_place:
            # The value that the storage holds was donated, and nobody else knows it: it may become the new one.
            if not shared or position not in shared:
                value = values[position]
                value.buffer = results[output]
                value.sharding = shardings[output]
        made: dict[int, Value] = {}

        def value_from(origin: Origin) -> Value:
            if origin.kind == "leaf":
                return values[origin.key]
            index = self._positions[origin.key]
            found = made.get(index)
            if found is None:
                found = made[index] = Value(self.program.specs[index], results[index])
                found.sharding = self.program.shardings[index]
            return found

        for place, origin in self._updates:
            tensor = place.tensor if isinstance(place, Cell) else given[place.key]
            storage_data(tensor).value = value_from(origin)
        for position, output in self._in_place:
            if position in shared:
                cell = self._sources[position]
                assert isinstance(cell, Cell)
                storage_data(cell.tensor).value = value_from(Origin("output", self.program.outputs[output]))
        moved = [place.tensor if isinstance(place, Cell) else given[place.key] for _, place in self._moved]
        for (cell, _), tensor in zip(self._moved, moved, strict=True):
            self.snapshot.rebind(cell, tensor, alone=False)
        for cells, origin, geometry, requires_grad in self._rebound:
            tensor = _made(value_from(origin), geometry)
            if requires_grad:
                tensor.requires_grad_()
            for cell in cells:
                self.snapshot.rebind(cell, tensor, alone=len(cells) == 1)
        return self.result(given, value_from)

    def result(self, given: Sequence[torch.Tensor], value_from: Callable[[Origin], Value]) -> Any:
        """What the function returns, with the values of the program's outputs from `value_from`."""
        leaves: list[Any] = []
        for index, place in enumerate(self._results):
            if isinstance(place, Cell):
                leaves.append(place.tensor)
            elif place.kind == "value":
                leaves.append(place.key)
            elif place.kind == "argument":
                leaves.append(given[place.key])
            elif place.kind == "view":
                base = self._bases[index]
                tensor = base.tensor if isinstance(base, Cell) else given[base.key]
                leaves.append(_view(tensor, self.seen.geometries[index]))
            elif index in self.seen.views:
                leaves.append(_view(leaves[self.seen.views[index]], self.seen.geometries[index]))
            else:
                leaves.append(_made(value_from(place), self.seen.geometries[index]))
        return tree_unflatten(leaves, self.seen.result_tree)


def _made(value: Value, geometry: Geometry | None) -> torch.Tensor:
    """A new tensor that looks at a new storage with `value` as `geometry` says."""
    tensor = new_tensor(value)
    return tensor if geometry is None else _view(tensor, geometry)


def _view(tensor: torch.Tensor, geometry: Geometry | None) -> torch.Tensor:
    """A tensor that looks at the storage of `tensor` as `geometry` says; None: all of it, in order."""
    if geometry is None:
        shape = storage_data(tensor).spec.shape
        geometry = Geometry(shape, contiguous_strides(shape), 0)
    with torch.no_grad():
        return tensor.as_strided(geometry.size, geometry.stride, geometry.offset)


def _check_layout(cell: Cell) -> None:
    """Raise `Mismatch` if a tensor has come to look at its storage in another way: `t_()`, `tensor.data = ...`."""
    if layout_of(cell.tensor) != cell.layout:
        raise Mismatch(f"{cell.path} looks at its contents in another way")


def _value_at(place: Cell | Origin, given: list[torch.Tensor]) -> Value | None:
    return storage_data(place.tensor if isinstance(place, Cell) else given[place.key]).value
