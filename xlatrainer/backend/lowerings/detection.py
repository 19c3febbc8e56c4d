"""torchvision's operators on boxes: pooling the regions of an image, and dropping boxes that overlap better ones.

A box is (x1, y1, x2, y2), a region of interest (image, x1, y1, x2, y2). May import: registry, jax.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from xlatrainer.backend.lowerings.registry import lowering

__all__ = ["without_overlaps"]

_REGIONS_AT_ONCE = 8  # each with a copy of its image, so that memory does not grow with the number of regions


def _fixed_samples(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, *rest) -> bool:
    """With a sampling ratio of 0 the number of samples of a region depends on its size."""
    return sampling_ratio > 0


def _fixed_samples_backward(grad, rois, scale, pooled_height, pooled_width, batch, channels, height, width, ratio, *_):
    return ratio > 0


def _shares(start, length, bins, samples, size):
    """How much each of `size` pixels along an axis counts in each bin of each region: [regions, bins, size].

    A bin is the mean of its samples, a sample interpolates between the two pixels around it, and one that lies more
    than a pixel outside of the image is 0.
    """
    steps = (jnp.arange(bins * samples, dtype=start.dtype) + 0.5) / samples
    places = start[:, None] + (length / bins)[:, None] * steps
    inside = (places >= -1) & (places <= size)
    places = jnp.clip(places, 0, size - 1)
    distance = jnp.abs(places[..., None] - jnp.arange(size, dtype=start.dtype))
    shares = jnp.where(inside[..., None], jnp.maximum(1 - distance, 0), 0)
    return shares.reshape(-1, bins, samples, size).mean(2)


def _region_shares(rois, scale, bins, samples, size, aligned):
    """The image of each region and its shares of rows and columns; `bins` and `size` are (vertical, horizontal)."""
    boxes = rois[:, 1:] * scale - (0.5 if aligned else 0)
    starts, lengths = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    if not aligned:
        lengths = jnp.maximum(lengths, 1)
    rows = _shares(starts[:, 1], lengths[:, 1], bins[0], samples, size[0])
    columns = _shares(starts[:, 0], lengths[:, 0], bins[1], samples, size[1])
    return rois[:, 0].astype(jnp.int32), rows, columns


def _computed(array):
    """Half types are computed in float32."""
    return array.astype(jnp.float32) if array.dtype.itemsize < 4 else array


@lowering("torchvision::roi_align", supports=_fixed_samples)
def roi_align(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned):
    images, scale = _computed(input), jnp.asarray(spatial_scale, _computed(rois).dtype)
    bins, size = (pooled_height, pooled_width), input.shape[2:]
    if not rois.shape[0]:
        return jnp.zeros((0, input.shape[1], *bins), input.dtype)
    regions = _region_shares(_computed(rois), scale, bins, sampling_ratio, size, aligned)

    def pooled(region):
        image, rows, columns = region
        return jnp.einsum("ph,chw,qw->cpq", rows, images[image], columns, precision=lax.Precision.HIGHEST)

    return lax.map(pooled, regions, batch_size=_REGIONS_AT_ONCE).astype(input.dtype)


@lowering("torchvision::_roi_align_backward", supports=_fixed_samples_backward)
def _roi_align_backward(
    grad, rois, spatial_scale, pooled_height, pooled_width, batch_size, channels, height, width, sampling_ratio, aligned
):
    scale = jnp.asarray(spatial_scale, _computed(rois).dtype)
    bins = (pooled_height, pooled_width)
    regions = _region_shares(_computed(rois), scale, bins, sampling_ratio, (height, width), aligned)
    total = jnp.zeros((batch_size, channels, height, width), _computed(grad).dtype)

    def add(total, region):
        image, rows, columns, own = region
        part = jnp.einsum("ph,cpq,qw->chw", rows, own, columns, precision=lax.Precision.HIGHEST)
        return total.at[image].add(part), None

    return lax.scan(add, total, (*regions, _computed(grad)))[0].astype(grad.dtype)


def _rounded_down(number, dtype):
    """`number` (float64) as the next lower one of `dtype`: the numbers of that type above it are the same ones."""
    rounded = number.astype(dtype)
    return jnp.where(rounded > number, jnp.nextafter(rounded, jnp.asarray(-jnp.inf, dtype)), rounded)


def without_overlaps(dets: Any, scores: Any, iou_threshold: Any) -> tuple[Any, Any]:
    """Non-maximum suppression: boxes by falling score, without those that overlap an earlier one that is kept.

    Args:
        dets: boxes, [N, 4].
        scores: [N].
        iou_threshold: intersection over union above which a box is dropped, a float64 scalar.

    Returns:
        int64[N], the numbers of the boxes that are kept and then of the others, and int64[], how many are kept.
    """
    count = dets.shape[0]
    order = jnp.argsort(scores, stable=True, descending=True)
    x1, y1, x2, y2 = _computed(dets)[order].T
    areas = (x2 - x1) * (y2 - y1)
    threshold = _rounded_down(iou_threshold, areas.dtype)
    numbers = jnp.arange(count)

    def visit(current, kept):
        width = jnp.maximum(jnp.minimum(x2[current], x2) - jnp.maximum(x1[current], x1), 0)
        height = jnp.maximum(jnp.minimum(y2[current], y2) - jnp.maximum(y1[current], y1), 0)
        shared = width * height
        overlaps = shared / (areas[current] + areas - shared) > threshold
        return kept & ~(kept[current] & overlaps & (numbers > current))

    kept = lax.fori_loop(0, count, visit, jnp.ones(count, bool)) if count else jnp.ones(0, bool)
    kept_first = jnp.argsort(~kept, stable=True)
    return order[kept_first].astype(jnp.int64), jnp.sum(kept, dtype=jnp.int64)
