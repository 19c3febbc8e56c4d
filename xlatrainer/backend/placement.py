"""Where arrays lie: on the one device, or spread over several, a `Home`, each array in its own way, a `Sharding`.

A trace has a home, and so have its leaves: what lies elsewhere is moved when the trace first uses it, so that a program
runs on one set of devices. Without a home (None) everything is on the first device. Shardings are interned by their
home: equal ones are the same object, and a value's is part of the identity of the traces that read it.

May import: ir, runtime, lowerings.partitioning, counters.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xlatrainer.backend import counters, runtime
from xlatrainer.backend.ir import Operation, Spec, Value
from xlatrainer.backend.lowerings.partitioning import current_mesh

__all__ = ["Home", "Sharding", "constrained_to", "home_of", "move"]


class Sharding:
    """How an array is spread over the devices of `home`; see `Home.sharding`.

    Attributes:
        home: the devices.
        jax: the same for JAX.
        text: says it for people, and in the same way in every process.
    """

    __slots__ = ("_leaves", "home", "jax", "text")

    def __init__(self, home: "Home", sharding: Any, text: str) -> None:
        self.home = home
        self.jax = sharding
        self.text = text
        self._leaves: dict[Spec, Operation] = {}

    def __repr__(self) -> str:
        return self.text

    def leaf(self, spec: Spec) -> Operation:
        """The operation of a leaf of this spec that lies so."""
        found = self._leaves.get(spec)
        if found is None:
            identity = f"{spec!r} as {self.text} on {self.home.text}"
            found = self._leaves[spec] = Operation(
                "xla::device_data", None, (spec,), detail=self.text, identity=identity, sharding=self
            )
        return found

    @property
    def is_replicated(self) -> bool:
        return self is self.home.replicated

    def watched_roots(self) -> dict[str, Any]:
        """For a snapshot of something that has it: nothing that a step could change."""
        return {}

    def described(self) -> Any:
        """The same as plain data, for `Home.described`; None if it is none of a mesh with named axes."""
        if self.is_replicated:
            return "replicated"
        if not isinstance(self.jax, jax.sharding.NamedSharding):
            return None
        return {"axes": list(self.jax.mesh.shape.items()), "spec": list(self.jax.spec)}

    def on(self, mesh: Any) -> Any:
        """The same for JAX, of an array of a program on `mesh`: JAX wants all of a program on one mesh."""
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()) if self.is_replicated else self.jax


class Home:
    """Several devices that programs run on together; one object for each sequence of devices, see `home_of`.

    Attributes:
        devices: the JAX devices, those of all processes.
        replicated: each device holds the whole array.
        one_at_a_time: whether a program must end before the next one starts.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = tuple(devices)
        self.text = ",".join(str(device.id) for device in self.devices)
        self._shardings: dict[Any, Sharding] = {}
        # On the CPUs of several processes: with dozens of programs in flight that do not wait for one another, those of
        # an evaluation, XLA was seen to stand still.
        self.one_at_a_time = self.devices[0].platform == "cpu" and self.spans_processes
        mesh = jax.sharding.Mesh(np.array(self.devices), ("devices",))
        self.replicated = Sharding(self, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), "replicated")

    def __repr__(self) -> str:
        return f"Home({self.text})"

    def watched_roots(self) -> dict[str, Any]:
        """For a snapshot of something that has it: nothing that a step could change."""
        return {}

    @property
    def spans_processes(self) -> bool:
        """Whether some of the devices belong to other processes."""
        return len({device.process_index for device in self.devices}) > 1

    def described(self, description: Any, rank: int) -> Sharding:
        """The sharding that `Sharding.described` wrote, maybe in another process, of arrays with `rank` dimensions."""
        if description == "replicated":
            return self.replicated
        names, sizes = zip(*description["axes"], strict=True)
        mesh = jax.sharding.Mesh(np.array(self.devices).reshape(sizes), names)
        spec = [tuple(entry) if isinstance(entry, list) else entry for entry in description["spec"]]
        return self.sharding(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)), rank)

    def sharding(self, found: Any, rank: int) -> Sharding:
        """The one `Sharding` that is `found`, a JAX sharding over these devices, of arrays with `rank` dimensions.

        Of all that replicate it is `replicated`. XLA says of an output that lies like an input the same in other words,
        which are not told apart.
        """
        known = self._shardings.get((found, rank))
        if known is None:
            known = self.replicated if found.is_fully_replicated else self._equal(found, rank)
            self._shardings[found, rank] = known
        return known

    def _equal(self, found: Any, rank: int) -> Sharding:
        if not isinstance(found, jax.sharding.NamedSharding):
            alike = [known for known in self._of_rank(rank) if known.jax.is_equivalent_to(found, rank)]
            return alike[0] if alike else Sharding(self, found, str(found))
        spec = list(found.spec) + [None] * (rank - len(found.spec))
        plain = jax.sharding.NamedSharding(found.mesh, jax.sharding.PartitionSpec(*spec))
        exact = self._shardings.get((plain, rank))
        if exact is not None:
            return exact
        if found.mesh == self.replicated.jax.mesh:  # the mesh that no user has named
            alike = [known for known in self._of_rank(rank) if known.jax.is_equivalent_to(found, rank)]
            if alike:
                return alike[0]
        axes = ",".join(f"{name}={size}" for name, size in plain.mesh.shape.items())
        made = self._shardings[plain, rank] = Sharding(self, plain, f"{tuple(spec)} of mesh({axes})")
        return made

    def _of_rank(self, rank: int) -> list[Sharding]:
        return [known for (_, of), known in self._shardings.items() if of == rank and not known.is_replicated]


def constrained_to(array: Any, sharding: Sharding) -> Any:
    """In a lowering: the array, to lie so."""
    return jax.lax.with_sharding_constraint(array, sharding.on(current_mesh()))


_homes: dict[tuple[Any, ...], Home] = {}


def home_of(devices: Sequence[Any]) -> Home:
    """The one home of these JAX devices."""
    key = tuple(devices)
    found = _homes.get(key)
    if found is None:
        found = _homes[key] = Home(key)
    return found


def move(value: Value, home: Home | None) -> None:
    """Bring the buffer of a value to another set of devices: whole on each of them, or on the one device.

    Raises:
        RuntimeError: if it is spread over several devices, since nobody asked for its parts to be gathered.
    """
    if not isinstance(value.buffer, jax.Array):  # lost, which whoever runs the program will hear
        return
    if value.sharding is not None and not value.sharding.is_replicated:
        raise RuntimeError(
            f"a tensor {value.spec!r} is sharded, {value.sharding.text}, over the devices {value.sharding.home.text}, "
            f"and programs run on {'the first device' if home is None else f'the devices {home.text}'} now. Make its "
            f"mesh the global one again (xlatrainer.distributed.set_global_mesh), or read it with .cpu()"
        )
    counters.add("Reshard")
    value.sharding = None if home is None else home.replicated
    value.buffer = runtime.moved(value.buffer, None if home is None else home.replicated.jax)
