"""Images from folders and TFRecord files, with the standard augmentation."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from xlatrainer.data import TfRecordWriter
from xlatrainer.data.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    decode_image,
    image_datasets,
    image_records,
    image_transform,
)
from xlatrainer.errors import RecordError

pytest.importorskip("torchvision")
PIL = pytest.importorskip("PIL.Image")

COLORS = ((250, 20, 30), (10, 240, 60), (5, 100, 200))


def picture(label: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    pixels = np.full((40, 60, 3), COLORS[label], np.uint8)
    file = io.BytesIO()
    PIL.fromarray(pixels).convert(mode).save(file, kind)
    return file.getvalue()


def make_folder(folder: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for label in range(3):
            (folder / part / f"class{label}").mkdir(parents=True)
            for number in range(count):
                (folder / part / f"class{label}" / f"{number}.png").write_bytes(picture(label))


def make_records(folder: Any) -> None:
    for part, count in (("train", 3), ("validation", 2)):
        for shard in range(2):
            with TfRecordWriter(f"{folder}/{part}-{shard:05}-of-00002") as writer:
                for label in range(3):
                    for _ in range(count):
                        writer.write({"image/encoded": picture(label), "image/class/label": label + 1})


def expected(label: int) -> torch.Tensor:
    """The color, with the mean and deviation of ImageNet taken out."""
    return (torch.tensor(COLORS[label]) / 255 - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)


def check(folder: Any, sizes: tuple[int, int]) -> None:
    train, test, _ = image_datasets(str(folder), size=16)
    assert (len(train), len(test)) == sizes  # type: ignore[arg-type]
    for dataset in (train, test):
        labels = []
        for image, label in DataLoader(dataset, batch_size=None):
            assert image.shape == (3, 16, 16)
            assert image.dtype == torch.float32
            torch.testing.assert_close(image.mean((1, 2)), expected(int(label)), atol=1e-5, rtol=1e-5)
            labels.append(int(label))
        assert set(labels) == {0, 1, 2}


def test_folders(tmp_path: Path) -> None:
    make_folder(tmp_path)
    check(tmp_path, (9, 6))
    assert image_datasets(str(tmp_path))[2] == 3
    (tmp_path / "val" / "class0").rename(tmp_path / "val" / "other")
    with pytest.raises(ValueError, match="other classes"):
        image_datasets(str(tmp_path))


def test_records(tmp_path: Path, bucket: str) -> None:
    for folder in (tmp_path, bucket):
        make_records(folder)
        for _ in range(2):  # the second time with indices beside the files
            check(folder, (18, 12))
    assert image_datasets(str(tmp_path))[2] == 1000
    dataset = image_records(f"{tmp_path}/train-*", image_transform(train=False, size=8), first_label=0)
    assert pickle.loads(pickle.dumps(dataset))[0][1] == 1


def test_augmentation_is_random_where_it_trains() -> None:
    noise = PIL.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8))
    train, test = image_transform(True, 24), image_transform(False, 24)
    assert not torch.equal(train(noise), train(noise))
    assert torch.equal(test(noise), test(noise))
    assert image_transform(False)(noise).shape == (3, 224, 224)


@pytest.mark.parametrize(
    ("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "RGBA"), ("GIF", "P")]
)
def test_all_images_become_rgb(kind: str, mode: str) -> None:
    image = decode_image(picture(1, kind, mode))
    assert (image.mode, image.size) == ("RGB", (60, 40))
    if mode != "L":
        assert np.abs(np.asarray(image, int)[20, 30] - COLORS[1]).max() < (
            25 if mode != "P" else 40
        )  # a palette has few colors


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a folder train"):
        image_datasets(str(tmp_path))
    with pytest.raises(ValueError, match="no image that can be read"):
        decode_image(b"none")
    with TfRecordWriter(tmp_path / "train") as writer:
        writer.write({"image/encoded": b"none", "image/class/label": 1})
        writer.write({"image/encoded": picture(0)})
    dataset = image_records(tmp_path / "train", image_transform(True, 8))
    with pytest.raises(RecordError, match="train: record 0: it is no image"):
        dataset[0]
    with pytest.raises(RecordError, match="record 1: the Example has no feature 'image/class/label'"):
        dataset[1]
