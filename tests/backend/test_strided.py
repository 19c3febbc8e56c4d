"""Views of flat data, read and written, against numpy's own strides."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlatrainer.backend.strided import Geometry, contiguous_strides, extent, read, write


def _reference(flat: np.ndarray, view: Geometry) -> np.ndarray:
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.size, [s * item for s in view.stride])


def _chain(rng: random.Random) -> tuple[int, Geometry]:
    """A geometry made by a random chain of numpy view operations, and the length of its data."""
    shape = [rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4))]
    base = np.arange(int(np.prod(shape)), dtype=np.int64)
    array = base.reshape(shape)
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(["transpose", "slice", "select", "expand", "diagonal", "window"])
        if kind == "transpose":
            array = array.transpose(rng.sample(range(array.ndim), array.ndim))
        elif array.ndim == 0 or array.size == 0:
            continue
        elif kind == "slice":
            dim = rng.randrange(array.ndim)
            start = rng.randrange(array.shape[dim])
            array = array[(slice(None),) * dim + (slice(start, None, rng.choice([1, 2, 3])),)]
        elif kind == "select" and array.ndim >= 2:  # numpy turns the last select into a scalar without memory
            dim = rng.randrange(array.ndim)
            array = array[(slice(None),) * dim + (rng.randrange(array.shape[dim]),)]
        elif kind == "expand":
            array = np.broadcast_to(array, (rng.choice([1, 2, 3]), *array.shape))
        elif kind == "diagonal" and array.ndim >= 2:
            array = np.diagonal(array)
        elif kind == "window":
            array = np.lib.stride_tricks.sliding_window_view(array, rng.randint(1, array.shape[-1]), axis=-1)
    offset = (array.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // 8
    strides = tuple(s // 8 for s in array.strides)
    return base.size, Geometry(array.shape, strides, offset if array.size else 0)


@pytest.mark.parametrize("seed", range(60))
def test_read_and_write_agree_with_numpy(seed: int) -> None:
    rng = random.Random(seed)
    length, view = _chain(rng)
    flat = np.random.default_rng(seed).normal(size=length).astype(np.float32)
    expected = _reference(flat, view)
    np.testing.assert_array_equal(np.asarray(read(jnp.asarray(flat), view)), expected)
    assert extent(view) <= length

    value = np.full(view.size, 7.0, np.float32)  # one value: overlapping elements have no defined winner
    target = flat.copy()
    np.lib.stride_tricks.as_strided(target[view.offset :], view.size, [s * 4 for s in view.stride])[...] = value
    np.testing.assert_array_equal(np.asarray(write(jnp.asarray(flat), jnp.asarray(value), view)), target)


@pytest.mark.parametrize(
    ("length", "view"),
    [
        (40, Geometry((3, 5), (10, 2), 11)),
        (24, Geometry((4, 2, 3), (1, 12, 4), 0)),
        (7, Geometry((2, 3), (3, 1), 1)),
        (9, Geometry((3,), (4,), 0)),
        (6, Geometry((2, 4, 3), (3, 0, 1), 0)),
    ],
)
def test_usual_views_need_no_gather(length: int, view: Geometry) -> None:
    flat = np.arange(length, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(read(jnp.asarray(flat), view)), _reference(flat, view))
    assert "gather" not in str(jax.make_jaxpr(lambda x: read(x, view))(flat))


def test_written_values_land_in_place() -> None:
    flat = np.zeros(12, np.float32)
    value = np.arange(6, dtype=np.float32).reshape(3, 2)
    out = np.asarray(write(jnp.asarray(flat), jnp.asarray(value), Geometry((3, 2), (1, 6), 2))).reshape(2, 6)
    np.testing.assert_array_equal(out[:, 2:5], value.T)
    assert out.sum() == value.sum()


def test_contiguous_strides_are_torchs() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((2, 0, 4)) == (4, 4, 1)
    assert contiguous_strides(()) == ()
