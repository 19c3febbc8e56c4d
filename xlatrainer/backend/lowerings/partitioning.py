"""How XLA's partitioner takes apart what it would not take apart well: said by factors, as in an einsum.

For several devices XLA partitions the operators that a lowering is made of one by one. On the CPU two things come out
badly. A convolution that is a gather of pixels with a product may gather the whole batch on each device. And a gradient
that is a sum over the batch is added up in full on every device, even where each needs its shard alone: the CPU's
compiler has no pass that makes a reduce-scatter of it, as those of GPUs and TPUs have.

May import: jax.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

__all__ = ["current_mesh", "lowering_on", "partitioned"]


class _Lowering(threading.local):
    mesh: Any = None
    needs_help = False


_lowering = _Lowering()


@contextlib.contextmanager
def lowering_on(mesh: Any, needs_help: bool) -> Iterator[None]:
    """The lowerings that are called in the block are for a program on this mesh; whether its partitioner needs help."""
    before = _lowering.mesh, _lowering.needs_help
    _lowering.mesh, _lowering.needs_help = mesh, needs_help
    try:
        yield
    finally:
        _lowering.mesh, _lowering.needs_help = before


def current_mesh() -> Any:
    """The mesh of the program whose operators are lowered; None if that is for one device."""
    return _lowering.mesh


def partitioned(function: Callable[..., Any], rule: str, split: str, *arrays: Any) -> Any:
    """`function(*arrays)`, partitioned over the factors `split` of `rule`, any other dimension whole on each device.

    Args:
        function: of the parts that a device has of `arrays`; its result is that device's part, or where a factor of
            `split` is not in the result, its summand.
        rule: a factor, one letter, for each dimension: "ij,jk->ik". Factors that are alike have the same letter.
        split: those of them that a device may have a part of.
        arrays: what it is called with.
    """
    if not _lowering.needs_help:
        return function(*arrays)
    operands, result = rule.split("->")
    factors = [*operands.split(","), result]

    def whole(*parts: Any) -> Any:  # JAX wants a signature without defaults, and constants within a function of its own
        return jax.jit(function)(*parts)

    call = custom_partitioning(whole)
    spaced = ", ".join(" ".join(each) for each in factors[:-1]) + " -> " + " ".join(result)
    call.def_partition(
        partition=_Partition(function, factors, split),
        sharding_rule=spaced,
        reduction_factors=tuple(f for f in split if f not in result),
        need_replication_factors=tuple(f for f in dict.fromkeys("".join(factors)) if f not in split),
    )
    return call(*arrays)


class _Partition:
    """What each device does, once the shardings of the operands and of the result are known."""

    def __init__(self, function: Callable[..., Any], factors: list[str], split: str) -> None:
        self.function = function
        self.factors = factors
        self.split = split

    def __call__(self, mesh: Any, operands: Any, result: Any) -> tuple[Any, ...]:
        """As `custom_partitioning` asks: the mesh, the function of the parts, how results and operands are sharded."""
        shapes = [*(operand.shape for operand in operands), result.shape]
        specs = [_entries(array.sharding, len(array.shape)) for array in [*operands, result]]
        axes: dict[str, tuple[str, ...]] = {}
        for names, spec, shape in [*zip(self.factors, specs, shapes, strict=True)][
            ::-1
        ]:  # the result has the last word
            for factor, entry, size in zip(names, spec, shape, strict=True):
                if factor in self.split and not axes.get(factor) and size % _parts(mesh, entry) == 0:
                    axes[factor] = entry
        kept = self.factors[-1]
        summed = tuple(axis for factor, entry in axes.items() if factor not in kept for axis in entry)
        summed_over = frozenset(summed)
        used: set[str] = set(summed)
        scattered: tuple[str, ...] = ()
        outer: dict[str, tuple[str, ...]] = {}  # how the result's factors lie
        inner: dict[str, tuple[str, ...]] = {f: entry for f, entry in axes.items() if f not in kept}
        for factor in kept:
            entry = axes.get(factor, ())
            if entry and summed_over.issuperset(entry) and not scattered:
                outer[factor], inner[factor], scattered = entry, (), entry
            else:
                free = entry if not used.intersection(entry) else ()
                outer[factor] = inner[factor] = free
                used.update(free)

        rest = tuple(axis for axis in summed if axis not in scattered)

        def sharding(names: str, of: dict[str, tuple[str, ...]]) -> Any:
            entries = [of.get(factor) or None for factor in names]
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))

        def part(*arrays: Any) -> Any:
            with jax.enable_x64(True):  # XLA asks on a thread of its own, where JAX's settings are the defaults
                return part_in_x64(*arrays)

        def part_in_x64(*arrays: Any) -> Any:
            made = self.function(*arrays)
            if scattered:
                dimension = next(i for i, factor in enumerate(kept) if outer[factor] == scattered)
                made = lax.psum_scatter(made, scattered, scatter_dimension=dimension, tiled=True)
            return lax.psum(made, rest) if rest else made  # of shards alone, where there are any

        return mesh, part, sharding(kept, outer), tuple(sharding(names, inner) for names in self.factors[:-1])


def _entries(sharding: Any, rank: int) -> list[tuple[str, ...]]:
    """The axes of each dimension."""
    spec = tuple(sharding.spec) + (None,) * (rank - len(sharding.spec))
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]


def _parts(mesh: Any, entry: tuple[str, ...]) -> int:
    parts = 1
    for axis in entry:
        parts *= mesh.shape[axis]
    return parts
