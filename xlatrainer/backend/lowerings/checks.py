"""Errors that depend on data: an index out of range is known only when the program runs.

A lowering calls `index_in_range` or `holds`; the program then also computes whether any check failed, and which first.
The executor reads that when the program is done and raises what CPU torch raises. Called outside of a program, with
plain arrays, the checks do nothing.

May import: jax.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["FAILURE_SHAPE", "Check", "collecting", "first_failure", "holds", "index_in_range"]


FAILURE_SHAPE = (2,)  # of what `first_failure` gives, int64


@partial(jax.tree_util.register_dataclass, data_fields=("failed", "value"), meta_fields=("kind", "message"))
@dataclass(frozen=True)
class Check:
    """One check of a program: `failed` is a 0-dim bool, `value` the first offending one (int64)."""

    failed: Any
    value: Any
    kind: type[Exception]
    message: str


class _Collector(threading.local):
    checks: list[Check] | None = None
    on_several = False


_collector = _Collector()


@contextlib.contextmanager
def collecting(on_several: bool = False) -> Iterator[list[Check]]:
    """The checks of the lowerings that are called in the block, by this thread; `on_several`: for several devices."""
    before = _collector.checks, _collector.on_several
    checks: list[Check] = []
    _collector.checks, _collector.on_several = checks, on_several
    try:
        yield checks
    finally:
        _collector.checks, _collector.on_several = before


def index_in_range(
    index: Any, size: int, kind: type[Exception], message: str, *, negative: bool = False, where: Any = None
) -> None:
    """Check that every index lies in 0 to `size` - 1, or with `negative` counts back from the end.

    Args:
        index: integers, any shape.
        size: elements there are.
        kind: what CPU torch raises.
        message: what is said; `{value}` becomes the offending index.
        negative: whether -1 to -`size` are right.
        where: bools like `index`, false for those that do not count. Default all count.
    """
    if _collector.checks is None or not index.size:
        return
    wrong = (index >= size) | (index < (-size if negative else 0))
    wrong = wrong if where is None else wrong & where
    if _collector.on_several:  # the largest, since which is the first is known only once all are in one place
        value = jnp.max(jnp.where(wrong, index.astype(jnp.int64), jnp.iinfo(jnp.int64).min))
    else:
        value = index.reshape(-1)[jnp.argmax(wrong.reshape(-1))].astype(jnp.int64)
    _collector.checks.append(Check(jnp.any(wrong), value, kind, message))


def holds(condition: Any, kind: type[Exception], message: str, *, value: Any = None) -> None:
    """Check that `condition`, bools of any shape, is true everywhere.

    Args:
        condition: what must hold.
        kind: what CPU torch raises.
        message: what is said; `{value}` becomes `value`.
        value: a whole number, 0-dim. Default 0.
    """
    if _collector.checks is None or not condition.size:
        return
    said = jnp.zeros((), jnp.int64) if value is None else value.astype(jnp.int64)
    _collector.checks.append(Check(~jnp.all(condition), said, kind, message))


def first_failure(checks: list[Check]) -> jax.Array:
    """Which of the checks failed first, and its value: int64[2], with -1 for none."""
    failed = jnp.stack([check.failed for check in checks])
    values = jnp.stack([check.value for check in checks])
    first = jnp.argmax(failed)
    return jnp.stack([jnp.where(jnp.any(failed), first, -1), values[first]])
