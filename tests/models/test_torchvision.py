"""torchvision's models: classification and segmentation trained, detection in eval mode; random weights."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models import detection, segmentation

import xlatrainer as xla
from tests.models.conftest import Compare
from tests.models.harness import (
    NUM_CLASSES,
    ROUNDING,
    SEED,
    TOLERANCE,
    TOLERANCE_64,
    Batch,
    Case,
    classified,
    fit_on_both,
    images,
    sgd,
)

pytestmark = pytest.mark.models


def _inception_loss(output: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(output.logits, batch["_target"]) + 0.4 * F.cross_entropy(output.aux_logits, batch["_target"])


def _classifier(name: str, size: int = 64, batch: int = 2, **options: Any) -> Case:
    builder = getattr(torchvision.models, name)
    make = options.pop("make", {})
    return Case(
        name,
        lambda: builder(weights=None, num_classes=NUM_CLASSES, **make),
        images(size, batch),
        **{"loss": classified, "optimizer": sgd, **options},
    )


def _pixels(size: int, batch: int = 2) -> Callable[[], Batch]:
    return lambda: {
        "_args": (torch.randn(batch, 3, size, size),),
        "_target": torch.randint(0, NUM_CLASSES, (batch, size, size)),
    }


def _segmented(output: Any, batch: Batch) -> Tensor:
    loss = F.cross_entropy(output["out"], batch["_target"])
    return loss + 0.5 * F.cross_entropy(output["aux"], batch["_target"])


def _segmenter(name: str, size: int = 64, batch: int = 2, **options: Any) -> Case:
    builder = getattr(segmentation, name)

    def make() -> nn.Module:
        return builder(weights=None, weights_backbone=None, num_classes=NUM_CLASSES, aux_loss=True)

    return Case(name, make, _pixels(size, batch), **{"loss": _segmented, "optimizer": sgd, **options})


def _detector(name: str, settings: dict[str, Any], **options: Any) -> Case:
    """With random weights all scores are low: the threshold is 0, so that there are boxes to compare."""
    builder = getattr(detection, name)
    threshold = "score_thresh" if name.startswith("retinanet") else "box_score_thresh"

    def make() -> nn.Module:
        return builder(
            weights=None,
            weights_backbone=None,
            num_classes=NUM_CLASSES,
            min_size=96,
            max_size=128,
            **{threshold: 0.0},
            **settings,
        )

    def batch() -> Batch:
        return {"_args": ([torch.rand(3, 96, 112), torch.rand(3, 100, 90)],)}

    return Case(name, make, batch, train=False, **options)


CASES = [
    _classifier("resnet18", chaotic=ROUNDING),
    _classifier("resnet50", chaotic=ROUNDING),
    _classifier("mobilenet_v3_small"),
    _classifier("mobilenet_v3_large"),
    _classifier("efficientnet_b0", chaotic=ROUNDING),
    _classifier("densenet121", chaotic=ROUNDING),
    _classifier("convnext_tiny"),
    _classifier("vit_b_16", make={"image_size": 64}),
    _classifier("swin_t"),
    _classifier("shufflenet_v2_x1_0", chaotic=ROUNDING),
    _classifier("squeezenet1_1", chaotic=ROUNDING),
    _classifier(
        "inception_v3", 299, loss=_inception_loss, make={"aux_logits": True, "init_weights": False}, chaotic=ROUNDING
    ),
    _segmenter("deeplabv3_resnet50", chaotic=ROUNDING),
    _segmenter("fcn_resnet50", chaotic=ROUNDING),
    _detector("fasterrcnn_resnet50_fpn", {"box_detections_per_img": 20}),
    # Masks are resized to their boxes one by one: each size of box is a program of its own.
    _detector(
        "maskrcnn_resnet50_fpn",
        {"box_detections_per_img": 3},
        chaotic="masks are pasted into boxes whose edges round to pixels",
    ),
    _detector("retinanet_resnet50_fpn", {"detections_per_img": 20}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_like_the_cpu(case: Case, compared: Compare) -> None:
    compared(case)


@pytest.mark.parametrize("name", ["retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn"])
def test_a_detector_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients of a step in float64, with the same proposals: those are drawn on the CPU for both."""
    drawn = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, device="cpu", **options: drawn(n, **options).to(device))
    torch.manual_seed(SEED)
    builder = getattr(detection, name)
    on_cpu = builder(weights=None, weights_backbone=None, num_classes=NUM_CLASSES, min_size=96, max_size=128).double()
    on_xla = copy.deepcopy(on_cpu).to("xla")
    pictures = [torch.rand(3, 96, 112).double(), torch.rand(3, 100, 90).double()]
    boxes = torch.tensor([[5.0, 5, 50, 60], [20, 30, 80, 90]]).double()
    found = []
    for model, device in ((on_cpu, "cpu"), (on_xla, "xla")):
        torch.manual_seed(SEED)
        targets = [{"boxes": boxes.to(device), "labels": torch.tensor([1, 2], device=device)} for _ in pictures]
        xla.counters.reset()
        losses = model.train()([picture.to(device) for picture in pictures], targets)
        sum(losses.values()).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append(([loss.item() for loss in losses.values()], torch.cat([g.flatten().cpu() for g in gradients])))
    assert not [counter for counter in xla.counters.snapshot() if counter.startswith(("aten::", "torchvision::"))]
    (wanted_losses, wanted), (losses, given) = found
    assert losses == pytest.approx(wanted_losses, rel=1e-6)
    assert (torch.linalg.vector_norm(given - wanted) / torch.linalg.vector_norm(wanted)).item() < TOLERANCE_64


@pytest.mark.filterwarnings("ignore:.*has no lowering for xla:RuntimeWarning")  # counted instead
def test_deformable_convolution_runs_on_the_cpu() -> None:
    """Counted, with the CPU's results and gradients."""
    torch.manual_seed(SEED)
    shapes = [(2, 4, 9, 8), (2, 18, 9, 8), (6, 4, 3, 3), (6,), (2, 9, 9, 8)]
    tensors = [torch.randn(shape) for shape in shapes]
    found = []
    for device in ("cpu", "xla"):
        xla.counters.reset()
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in tensors]
        image, offset, weight, bias, mask = leaves
        result = torchvision.ops.deform_conv2d(image, offset, weight, bias, padding=1, mask=mask)
        gradients = torch.autograd.grad(result.square().sum(), leaves)
        found.append([tensor.detach().cpu() for tensor in (result, *gradients)])
    torch.testing.assert_close(found[1], found[0])
    ran = {counter for counter in xla.counters.snapshot() if "::" in counter}
    assert ran == {"torchvision::deform_conv2d", "torchvision::_deform_conv2d_backward"}


def test_with_the_trainer() -> None:
    model = torchvision.models.resnet18(weights=None, num_classes=NUM_CLASSES)
    batches = [(torch.randn(2, 3, 64, 64), torch.randint(0, NUM_CLASSES, (2,))) for _ in range(2)]
    on_xla, on_cpu = fit_on_both(model, batches, metrics=["accuracy"])
    assert on_xla == pytest.approx(on_cpu, rel=TOLERANCE)
