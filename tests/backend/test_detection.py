"""torchvision's operators: the functions on plain arrays, and where torchvision is installed the operators."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import xlatrainer as xla
from xlatrainer.backend import runtime
from xlatrainer.backend.lowerings.detection import roi_align, without_overlaps
from xlatrainer.backend.lowerings.registry import foreign


def _boxes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes of which many overlap, and scores of which some are equal."""
    corners = torch.rand(count, 2) * 50
    scores = torch.rand(count)
    scores[::7] = 0.5
    return torch.cat([corners, corners + torch.rand(count, 2) * 20], 1), scores


def _kept(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[int]:
    """Non-maximum suppression, written as it is defined."""
    kept: list[int] = []
    for number in scores.argsort(descending=True, stable=True).tolist():
        for better in kept:
            low, high = torch.max(boxes[number, :2], boxes[better, :2]), torch.min(boxes[number, 2:], boxes[better, 2:])
            shared = (high - low).clamp(min=0).prod()
            areas = [(boxes[i, 2:] - boxes[i, :2]).prod() for i in (number, better)]
            if (shared / (sum(areas) - shared)).double() > threshold:
                break
        else:
            kept.append(number)
    return kept


@pytest.mark.parametrize("threshold", [0.1, 0.5])
def test_suppression_is_as_defined(threshold: float) -> None:
    boxes, scores = _boxes(60)
    with runtime.x64():
        order, count = without_overlaps(jnp.asarray(boxes.numpy()), jnp.asarray(scores.numpy()), jnp.float64(threshold))
    expected = _kept(boxes, scores, threshold)
    assert 1 < len(expected) < 60
    assert order[: int(count)].tolist() == expected
    assert sorted(order.tolist()) == list(range(60))


def test_suppression_at_the_threshold() -> None:
    """An overlap of exactly the threshold is kept; of float32's 0.1, which is more than 0.1, it is not."""
    boxes = jnp.asarray([[0, 0, 10, 1], [9, 0, 10, 1]], jnp.float32)
    scores = jnp.asarray([1, 0.5], jnp.float32)
    with runtime.x64():
        assert int(without_overlaps(boxes, scores, jnp.float64(np.float32(0.1)))[1]) == 2
        assert int(without_overlaps(boxes, scores, jnp.float64(0.1))[1]) == 1


def test_a_region_of_whole_pixels_is_their_mean() -> None:
    image = np.arange(2 * 1 * 4 * 6, dtype=np.float32).reshape(2, 1, 4, 6)
    regions = np.array([[1, 0, 0, 4, 2], [0, -90, -90, -80, -80]], np.float32)  # the second lies far outside
    pooled = roi_align(jnp.asarray(image), jnp.asarray(regions), 1.0, 1, 2, 2, True)
    assert pooled.shape == (2, 1, 1, 2)
    # pixels have their centres at halves; at the border a sample is the pixel itself
    samples = np.clip(np.array([0.5, 1.5, 2.5, 3.5]) - 0.5, 0, 5).reshape(2, 2).mean(1)
    rows = np.clip(np.array([0.5, 1.5]) - 0.5, 0, 3).mean()
    np.testing.assert_allclose(pooled[0, 0, 0], 24 + 6 * rows + samples)
    np.testing.assert_array_equal(pooled[1], 0)


def test_torchvision_is_not_imported() -> None:
    code = "import sys, xlatrainer; assert 'torchvision' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _on_xla(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().to("xla") for tensor in tensors]


def test_nms() -> None:
    ops = pytest.importorskip("torchvision.ops")
    for dtype in (torch.float32, torch.float64):
        boxes, scores = (tensor.to(dtype) for tensor in _boxes(200))
        xla.counters.reset()
        for threshold in (0.1, 0.5, 0.9):
            kept = ops.nms(*_on_xla(boxes, scores), threshold)
            assert torch.equal(kept.cpu(), ops.nms(boxes, scores, threshold))
        assert not [name for name in xla.counters.snapshot() if name.startswith("torchvision::")]
    nothing = ops.nms(*_on_xla(boxes[:0], scores[:0]), 0.5)
    assert nothing.shape == (0,)
    assert nothing.dtype is torch.int64
    groups = torch.randint(0, 5, (200,))
    kept = ops.batched_nms(*_on_xla(boxes, scores, groups), 0.3)
    assert torch.equal(kept.cpu(), ops.batched_nms(boxes, scores, groups, 0.3))


def test_nms_refuses_what_does_not_fit() -> None:
    ops = pytest.importorskip("torchvision.ops")
    boxes, scores = _on_xla(*_boxes(5))
    with pytest.raises(RuntimeError, match=r"shape \[5\]"):
        ops.nms(boxes, scores[:4], 0.5)
    with pytest.raises(RuntimeError, match=r"shape \[N, 4\]"):
        ops.nms(boxes[:, :3], scores, 0.5)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_roi_align(aligned: bool, samples: int) -> None:
    ops = pytest.importorskip("torchvision.ops")
    image = torch.randn(2, 5, 20, 30, dtype=torch.float64, requires_grad=True)
    corners = torch.rand(21, 2, dtype=torch.float64) * 80 - 10
    images = torch.randint(0, 2, (21, 1)).double()
    regions = torch.cat([images, corners, corners + torch.rand(21, 2, dtype=torch.float64) * 60], 1)
    expected = ops.roi_align(image, regions, (7, 5), 0.4, samples, aligned)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    on_xla = image.detach().to("xla").requires_grad_()
    xla.counters.reset()
    actual = ops.roi_align(on_xla, regions.to("xla"), (7, 5), 0.4, samples, aligned)
    actual.backward(gradient.to("xla"))
    assert not [name for name in xla.counters.snapshot() if "::" in name]
    torch.testing.assert_close(actual.cpu(), expected)
    torch.testing.assert_close(on_xla.grad.cpu(), image.grad)


def test_lowerings_have_the_arguments_of_the_operators() -> None:
    pytest.importorskip("torchvision")
    for name, lowering in foreign().items():
        namespace, _, operator = name.partition("::")
        schema = getattr(getattr(torch.ops, namespace), operator).default._schema
        count = lowering.function.__code__.co_argcount
        assert count == len(schema.arguments), name
