"""Data that is made up."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import xlatrainer as xla
from xlatrainer.data.device_loader import MpDeviceLoader
from xlatrainer.data.synthetic import FakeImages, FnDataGenerator, SampleGenerator


def test_the_same_object_in_each_pass() -> None:
    batch = (torch.ones(2, 3), torch.zeros(2, 1))
    samples = SampleGenerator(batch, 4)
    assert [found is batch for found in samples] == [found is batch for found in samples] == [True] * 4
    history = xla.Trainer(nn.Linear(3, 1), "sgd", "mse").fit(samples, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    assert len(list(MpDeviceLoader(samples))) == 4


def test_batches_of_a_function() -> None:
    batches = FnDataGenerator(lambda x: x.sum(1), 5, torch.rand, [2, 3], count=3)
    (first, target), *_ = list(batches)
    assert (first.shape, target.shape, len(batches)) == ((5, 2, 3), (5, 3), 3)
    assert torch.equal(target, first.sum(1))
    assert not torch.equal(next(iter(batches))[0], first)
    assert next(iter(FnDataGenerator(lambda x: x, 2)))[0].shape == (2, 1)


def test_images_are_the_same_each_time_and_differ() -> None:
    images = FakeImages((3, 8, 9), 5, count=40)
    assert len(images) == 40
    again = FakeImages((3, 8, 9), 5, count=40)
    for index in (0, 7, 39):
        assert torch.equal(images[index][0], again[index][0])
        assert images[index][1] == again[index][1]
    assert torch.equal(images[-1][0], images[39][0])
    assert len({tuple(image.flatten().tolist()) for image, _ in images}) == 40
    assert {label for _, label in images} == set(range(5))
    assert not torch.equal(FakeImages((3, 8, 9), 5, seed=1)[0][0], images[0][0])
    with pytest.raises(IndexError, match="there are 40 images; there is none of index 40"):
        images[40]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_dtypes_of_images(dtype: torch.dtype) -> None:
    image = FakeImages((3, 64, 64), dtype=dtype)[0][0]
    assert image.dtype is dtype
    values = image.float()
    mean, spread = (127.5, 74.0) if dtype is torch.uint8 else (0.0, 1.0)
    assert abs(values.mean().item() - mean) < 0.1 * spread
    assert abs(values.std().item() - spread) < 0.1 * spread


def test_a_trainer_trains_on_images() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 10))
    loader = DataLoader(FakeImages((3, 4, 4), 10, count=32), 8, shuffle=True)
    history = xla.Trainer(model, "adam", metrics=["accuracy"]).fit(loader, epochs=2, verbose=0)
    assert len(history.history["accuracy"]) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SampleGenerator(1, 0), "sample_count must be at least 1"),
        (lambda: FnDataGenerator(abs, 0), "batch_size must be at least 1"),
        (lambda: FnDataGenerator(abs, 1, count=0), "count must be at least 1"),
        (lambda: FakeImages((32, 32)), r"shape must be \(channels, height, width\), got \(32, 32\)"),
        (lambda: FakeImages(classes=0), "classes must be at least 1"),
        (lambda: FakeImages(dtype=torch.int64), "dtype must be a floating one or torch.uint8, got torch.int64"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
