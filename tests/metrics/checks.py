"""What every metric that takes weights must keep to, whatever it computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from xlatrainer.metrics.metric import Metric


def value(metric: Metric, *batches: tuple[Any, ...], device: str = "cpu") -> float:
    """The metric over these batches of (prediction, target) or (prediction, target, sample_weight), from its start."""
    metric.to(torch.device(device))
    for prediction, target, *weight in batches:
        given = {"sample_weight": weight[0].to(device)} if weight else {}
        metric.update(prediction.to(device), target.to(device), **given)
    result = metric.compute()
    assert result.shape == ()
    return float(result)


def split(*columns: Tensor, size: int = 7) -> list[tuple[Tensor, ...]]:
    """Batches of `size` rows, the last one short."""
    return list(zip(*(column.split(size) for column in columns), strict=True))


def check_weights(make: Callable[[], Metric], prediction: Tensor, target: Tensor, abs: float = 1e-5) -> None:
    """Batches of any size, rows that pad, weights of whole numbers: all as if the rows were there that often."""
    whole = value(make(), (prediction, target))
    assert value(make(), *split(prediction, target)) == pytest.approx(whole, abs=abs)
    rows = len(target)
    padding = torch.full((3, *prediction.shape[1:]), float("nan"))
    padded = torch.cat([prediction, padding]), torch.cat([target, target[:3]])
    is_real = torch.arange(rows + 3) < rows
    assert value(make(), *split(*padded, is_real)) == pytest.approx(whole, abs=abs)
    assert value(make().set_weighted(), *split(*padded, is_real.float())) == pytest.approx(whole, abs=abs)
    assert value(make().set_weighted(), *split(*padded, is_real)) == pytest.approx(whole, abs=abs)
    counts = torch.arange(rows) % 3
    repeated = prediction.repeat_interleave(counts, 0), target.repeat_interleave(counts, 0)
    expected = pytest.approx(value(make(), repeated), abs=abs)
    assert value(make().set_weighted(), *split(prediction, target, counts.float())) == expected
    assert value(make().set_weighted(), *split(prediction, target, counts.float() / 2)) == expected
    assert value(make(), *split(prediction, target), device="xla") == pytest.approx(whole, abs=abs)
