"""Histograms, the most frequent value, reductions of segments, norms held below a bound."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.dtypes import compute_dtype, to_numpy
from xlatrainer.backend.lowerings.checks import holds
from xlatrainer.backend.lowerings.comparison import sorted_with_indices
from xlatrainer.backend.lowerings.registry import lowering


def _has_elements(self, dim=-1, keepdim=False):
    """Of nothing there is no mode; the CPU says so, torch's meta kernel does not."""
    return self.dim() == 0 or self.shape[dim] > 0


@lowering("mode", supports=_has_elements)
def mode(self, dim=-1, keepdim=False):
    """The smallest of the most frequent values and the index of its last occurrence; NaNs equal nothing."""
    if not self.ndim:
        return self, jnp.zeros((), jnp.int64)
    dim %= self.ndim
    values, indices = (jnp.moveaxis(array, dim, -1) for array in sorted_with_indices(self, dim))
    place = lax.broadcasted_iota(jnp.int64, values.shape, values.ndim - 1)
    begins = jnp.concatenate([jnp.ones_like(values[..., :1], bool), values[..., 1:] != values[..., :-1]], -1)
    run = place - lax.cummax(jnp.where(begins, place, 0), axis=values.ndim - 1)
    longest = jnp.argmax(run, -1, keepdims=True)
    picked = [jnp.moveaxis(jnp.take_along_axis(array, longest, -1), -1, dim) for array in (values, indices)]
    return tuple(picked if keepdim else (jnp.squeeze(array, dim) for array in picked))


# histograms


def _outer_edges(column, left=0, right=0, margin=0.5):
    """The range of a histogram: the one given, or that of the data where it is empty; with a margin if of width 0."""
    left, right = jnp.asarray(left, column.dtype), jnp.asarray(right, column.dtype)
    if column.size:
        given = left != right
        left, right = jnp.where(given, left, jnp.min(column)), jnp.where(given, right, jnp.max(column))
    elif margin == 0.5:  # histc and histogram differ in this too
        right = jnp.where(left == right, left + 1, right)
    empty = left == right
    return jnp.where(empty, left - margin, left), jnp.where(empty, right + margin, right)


@lowering("histc", static=("bins",), takes_specs=True)
def histc(self, bins=100, min=0, max=0, *, out_specs):
    values = self.reshape(-1).astype(compute_dtype(out_specs[0].dtype))
    left, right = _outer_edges(values, *(getattr(number, "array", number) for number in (min, max)), margin=1)
    holds(jnp.isfinite(left) & jnp.isfinite(right), RuntimeError, "torch.histc: the range of the input is not finite")
    inside = (values >= left) & (values <= right)
    place = jnp.where(inside, (values - left) * bins / (right - left), bins + 1).astype(jnp.int32)
    place = jnp.where(inside, jnp.minimum(place, bins - 1), bins)
    counts = jnp.zeros(bins + 1, jnp.int64).at[place].add(1)
    return counts[:bins].astype(to_numpy(out_specs[0].dtype))


def _edges(points, bins, range):
    """For each column of the points its edges, evenly between the outer ones."""
    ranges = [(0, 0)] * len(bins) if range is None else zip(range[::2], range[1::2], strict=True)
    outer = [_outer_edges(points[:, column], *bounds) for column, bounds in enumerate(ranges)]
    return [_linspace(*bounds, count) for bounds, count in zip(outer, bins, strict=True)]


def _linspace(start, end, bins):
    """From both ends towards the middle, as `linspace` of torch computes it."""
    index = jnp.arange(bins + 1, dtype=start.dtype)
    step = (end - start) / bins
    return jnp.where(index < (bins + 1) // 2, start + step * index, end - step * (bins - index))


def _histogram(points, edges, weight, density):
    """How many points, or which weight of them, fall into each cell; a cell has its left edge, the last one both."""
    shape = tuple(edge.shape[0] - 1 for edge in edges)
    place = jnp.zeros(points.shape[0], jnp.int32)
    inside = jnp.ones(points.shape[0], bool)
    for column, (edge, count) in enumerate(zip(edges, shape, strict=True)):
        values = points[:, column]
        cell = jnp.searchsorted(edge, values, side="right").astype(jnp.int32) - 1
        place = place * count + jnp.clip(cell, 0, count - 1)
        inside &= (values >= edge[0]) & (values <= edge[-1])
    weight = jnp.ones(points.shape[0], points.dtype) if weight is None else weight.reshape(-1)
    counts = jnp.zeros(math.prod(shape), points.dtype).at[place].add(jnp.where(inside, weight, 0)).reshape(shape)
    if density:
        counts = counts / jnp.sum(counts)
        for column, edge in enumerate(edges):
            counts = counts / jnp.diff(edge).reshape([-1 if d == column else 1 for d in range(len(edges))])
    return counts


def _is_floating(self, *rest, **options):
    """Of other numbers the CPU says that it makes no histogram; torch has no meta kernel that would."""
    return self.is_floating_point()


@lowering("histogram.bin_ct", static=("bins", "range"), supports=_is_floating)
def histogram_bin_ct(self, bins=100, *, range=None, weight=None, density=False):
    points = self.reshape(-1, 1)
    edges = _edges(points, [bins], range)
    return _histogram(points, edges, weight, density), edges[0]


@lowering("histogram.bins_tensor", supports=_is_floating)
def histogram_bins_tensor(self, bins, *, weight=None, density=False):
    return _histogram(self.reshape(-1, 1), [bins], weight, density), bins


@lowering("_histogramdd_bin_edges", static=("bins", "range"), supports=_is_floating)
def histogramdd_bin_edges(self, bins, *, range=None, weight=None, density=False):
    return tuple(_edges(self.reshape(-1, self.shape[-1]), bins, range))


@lowering("_histogramdd_from_bin_cts", static=("bins", "range"), supports=_is_floating)
def histogramdd_from_bin_cts(self, bins, *, range=None, weight=None, density=False):
    points = self.reshape(-1, self.shape[-1])
    return _histogram(points, _edges(points, bins, range), weight, density)


@lowering("_histogramdd_from_bin_tensors", supports=_is_floating)
def histogramdd_from_bin_tensors(self, bins, *, weight=None, density=False):
    return _histogram(self.reshape(-1, self.shape[-1]), bins, weight, density)


# segments


def _segments(offsets, length):
    """The segment of each row; rows behind the last have a number that none has."""
    return jnp.searchsorted(offsets[1:], jnp.arange(length), side="right")


_SEGMENT_REDUCTIONS = {
    "sum": (jax.ops.segment_sum, lambda a, b: a + b, 0),
    "mean": (jax.ops.segment_sum, lambda a, b: a + b, 0),
    "prod": (jax.ops.segment_prod, lambda a, b: a * b, 1),
    "max": (jax.ops.segment_max, jnp.maximum, -math.inf),
    "min": (jax.ops.segment_min, jnp.minimum, math.inf),
}


def _offsets(lengths, offsets):
    if offsets is not None:
        return offsets
    zero = jnp.zeros_like(lengths[..., :1])
    return jnp.concatenate([zero, jnp.cumsum(lengths, -1, dtype=lengths.dtype)], -1)


def _over_batch(function, axis):
    """`function` of one list of segments for each of the leading dims."""
    for _ in range(axis):
        function = jax.vmap(function)
    return function


def _has_segments(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    """Lists of segments for all leading dims; of others the CPU says what torch says."""
    given = lengths if offsets is None else offsets
    return indices is None and given is not None and given.dim() == axis + 1


@lowering("segment_reduce", static=("axis",), supports=_has_segments)
def segment_reduce(data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    function, combine, neutral = _SEGMENT_REDUCTIONS[reduce]

    def one(data, offsets):
        num = offsets.shape[0] - 1
        reduced = function(data, _segments(offsets, data.shape[0]), num)
        sizes = jnp.diff(offsets).reshape(-1, *[1] * (data.ndim - 1))
        start = jnp.asarray(neutral if initial is None else initial).astype(data.dtype)
        reduced = jnp.where(sizes == 0, start, combine(reduced, start))
        if reduce != "mean":
            return reduced
        unset = jnp.nan if initial is None else start
        return jnp.where(sizes == 0, unset, reduced / jnp.maximum(sizes, 1).astype(data.dtype))

    if lengths is not None and not unsafe:
        message = f"segment_reduce(): Expected all rows of lengths along axis to sum to {data.shape[axis]}"
        holds(jnp.sum(lengths, -1) == data.shape[axis], RuntimeError, message)
    return _over_batch(one, axis)(data, _offsets(lengths, offsets))


def _extreme_gradient(grad, output, data, segment):
    """Elements that are the extreme share its gradient evenly."""
    chosen = (data == output[segment]) | jnp.isnan(data)
    shares = jax.ops.segment_sum(chosen.astype(data.dtype), segment, output.shape[0])
    return jnp.where(chosen, grad[segment] / shares[segment], 0)


def _product_gradient(grad, output, data, segment, initial):
    """The product of the others: a quotient where the element allows it, else made of what the others are."""
    count = output.shape[0]
    zero, nan = data == 0, jnp.isnan(data)
    rest = jax.ops.segment_prod(jnp.where(zero | nan, 1, data), segment, count)[segment] * initial
    zeros, nans = (jax.ops.segment_sum(mask.astype(jnp.int32), segment, count)[segment] for mask in (zero, nan))
    others = jnp.where(nans - nan > 0, jnp.nan, jnp.where(zeros - zero > 0, 0, rest))
    return grad[segment] * jnp.where(zero | nan, others, output[segment] / data)


@lowering("_segment_reduce_backward", static=("axis",))
def segment_reduce_backward(grad, output, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None):
    def one(grad, output, data, offsets):
        num = offsets.shape[0] - 1
        segment = _segments(offsets, data.shape[0])
        covered = (segment < num).reshape(-1, *[1] * (data.ndim - 1))
        if reduce in ("max", "min"):
            pulled = _extreme_gradient(grad, output, data, segment)
        elif reduce == "prod":
            start = jnp.asarray(1 if initial is None else initial).astype(data.dtype)
            pulled = _product_gradient(grad, output, data, segment, start)
        else:
            pulled = grad[segment]
            if reduce == "mean":
                sizes = jnp.diff(offsets)[segment].reshape(covered.shape)
                pulled = pulled / sizes.astype(data.dtype)
        return jnp.where(covered, pulled, 0)

    return _over_batch(one, axis)(grad, output, data, _offsets(lengths, offsets))
