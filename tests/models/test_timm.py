"""Image models of `timm`, one of each family, with random weights."""

from typing import Any

import pytest
import timm
import torch

from tests.models.conftest import Compare
from tests.models.harness import NUM_CLASSES, ROUNDING, TOLERANCE, Case, classified, fit_on_both, images, sgd

pytestmark = pytest.mark.models


def _case(name: str, size: int = 64, batch: int = 2, **options: Any) -> Case:
    make = options.pop("make", {})
    return Case(
        name,
        lambda: timm.create_model(name, pretrained=False, num_classes=NUM_CLASSES, **make),
        images(size, batch),
        **{"loss": classified, "optimizer": sgd, **options},
    )


SIZED = {"img_size": 64}  # for models that are built for one size of image
CASES = [
    _case("resnet10t"),
    _case("regnety_002"),
    # More images, since their last batch norms are over single pixels: of two numbers nothing but the sign is left.
    _case("mobilenetv4_conv_small", batch=8, chaotic=ROUNDING),
    _case("ghostnet_100", batch=8, chaotic=ROUNDING),
    _case("convnextv2_atto"),
    _case("repvgg_a0", chaotic=ROUNDING),
    _case("eca_nfnet_l0"),
    _case("vit_tiny_patch16_224", make=SIZED),
    _case("beit_base_patch16_224", make=SIZED | {"depth": 2}),
    _case("swinv2_tiny_window8_256", make=SIZED),
    _case("mixer_s32_224", make=SIZED),
    _case("cait_xxs24_224", make=SIZED | {"depth": 2}),
    _case("mobilevit_xxs"),
    _case("edgenext_xx_small"),
    _case("poolformer_s12"),
    _case("maxvit_rmlp_pico_rw_256", make=SIZED),
    _case("hrnet_w18_small", chaotic=ROUNDING),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_like_the_cpu(case: Case, compared: Compare) -> None:
    compared(case)


def test_with_the_trainer() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=NUM_CLASSES, depth=2, **SIZED)
    batches = [(torch.randn(2, 3, 64, 64), torch.randint(0, NUM_CLASSES, (2,))) for _ in range(2)]
    on_xla, on_cpu = fit_on_both(model, batches, metrics=["accuracy"])
    assert on_xla == pytest.approx(on_cpu, rel=TOLERANCE)
