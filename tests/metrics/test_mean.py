"""Means over examples, whatever the batches."""

import pytest
import torch
from torch import Tensor

from tests.trainer.helpers import DEVICES
from xlatrainer.metrics.mean import Mean, MeanMetric


def mean_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs().mean()


def errors(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [mean_error, errors])
def test_a_short_last_batch_counts_for_what_it_holds(device: str, function: object) -> None:
    prediction, target = torch.randn(2, 11, 3)
    metric = MeanMetric(function).to(torch.device(device))  # type: ignore[arg-type]
    for p, t in zip(prediction.split(4), target.split(4), strict=True):
        metric.update(p.to(device), t.to(device))
    assert metric.compute().item() == pytest.approx((prediction - target).abs().mean().item(), abs=1e-6)
    metric.reset()
    metric.update(prediction[:1].to(device), target[:1].to(device))
    assert metric.compute().item() == pytest.approx((prediction - target)[0].abs().mean().item(), abs=1e-6)


def test_state_is_a_sum_and_an_exact_count() -> None:
    mean = Mean("loss")
    mean.update(torch.tensor(2.0, dtype=torch.bfloat16), 3)
    assert (mean.total.dtype, mean.weight.dtype) == (torch.float32, torch.int64)
    assert (mean.total.item(), mean.weight.item()) == (6.0, 3)


def test_a_gradient_is_not_kept() -> None:
    mean = Mean("loss")
    mean.update(torch.ones((), requires_grad=True) * 2)
    assert not mean.total.requires_grad


def test_names() -> None:
    assert MeanMetric(errors).name == "errors"
    assert MeanMetric(errors, "mae").name == "mae"
    with pytest.raises(ValueError, match=r"a lambda has no name.*MeanMetric\(function, name=...\)"):
        MeanMetric(lambda p, t: p)


def test_a_function_must_return_a_tensor() -> None:
    with pytest.raises(TypeError, match="metric 'mae' must return a tensor, got float"):
        MeanMetric(lambda p, t: 1.0, "mae").update(torch.ones(1), torch.ones(1))  # type: ignore[arg-type,return-value]
