"""Images with labels, as networks for ImageNet are trained on: from folders of files, or from TFRecord files.

Decoding and augmentation are torchvision's and Pillow's. Owns what is in which folder and which feature of an Example,
and the standard sequence of augmentations. `FakeImages` makes such data up.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from xlatrainer import storage
from xlatrainer.data.tfrecord.dataset import Paths, TfRecordDataset
from xlatrainer.data.tfrecord.features import Feature
from xlatrainer.optional import require

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "decode_image", "image_datasets", "image_records", "image_transform"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Of the pixels of ImageNet's training images, from 0 to 1: red, green, blue."""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Their standard deviations."""

_TRAIN, _TEST = (
    ("train",),
    ("val", "validation", "test"),
)  # names of folders, and what names of TFRecord files begin with
_INSTALL = 'pip install "xlatrainer[vision]"'


def image_transform(train: bool, size: int = 224) -> Callable[[Any], Tensor]:
    """The standard augmentation for ImageNet: from a PIL image to a float32 tensor of shape (3, size, size).

    To train: a random part of 8 to 100% of the image, of a random shape from 3:4 to 4:3, resized, and a horizontal flip
    every other time. To test: resized so that the shorter side is 256 for a size of 224 (as much larger for others),
    and the middle of that. Then the channels get the mean 0 and the deviation 1 that they have over ImageNet.

    Args:
        train: Whether to train.
        size: Of the result, in pixels; default 224.

    Raises:
        ImportError: Without torchvision.
    """
    transforms = require("torchvision.transforms", "image_transform", _INSTALL)
    if train:
        cut = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    else:
        cut = [transforms.Resize(round(size * 256 / 224)), transforms.CenterCrop(size)]
    return transforms.Compose([*cut, transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)])


def decode_image(content: bytes) -> Any:
    """The RGB image, of PIL, in the bytes of a JPEG, PNG or any other file that Pillow reads.

    Raises:
        ImportError: Without Pillow.
        ValueError: If Pillow cannot read it.
    """
    image = require("PIL.Image", "decode_image", _INSTALL)
    try:
        with image.open(io.BytesIO(content)) as file:
            return file.convert("RGB")
    except OSError as error:
        raise ValueError(f"it is no image that can be read: {error}") from None


def image_records(
    paths: Paths,
    transform: Callable[[Any], Any],
    *,
    image_key: str = "image/encoded",
    label_key: str = "image/class/label",
    first_label: int = 1,
) -> TfRecordDataset:
    """(image, label) from TFRecord files of Examples, by default as TensorFlow's scripts write ImageNet.

    Args:
        paths: The files, as for `TfRecordDataset`.
        transform: Called with the PIL image; see `image_transform`.
        image_key: The feature with the bytes of an image file.
        label_key: The feature with the number of the class.
        first_label: The number that becomes class 0; default 1.

    Raises:
        RecordError: When reading a damaged record, or one without these features; it names file and record.
    """
    features = {image_key: Feature(bytes, transform=_Decoded(transform)), label_key: Feature(torch.int64)}
    return TfRecordDataset(paths, features, _Pair(image_key, label_key, first_label))


def image_datasets(folder: str, size: int = 224) -> tuple[Dataset[Any], Dataset[Any], int]:
    """The training and test images in a folder, with the standard augmentation, and the number of classes.

    Args:
        folder: With folders "train" and "val", each with a folder of image files for each class; or, local or at a URL,
            with TFRecord files whose names begin with "train" and "validation" (see `image_records`). "validation" or
            "test" may stand for "val".
        size: Of the images, in pixels; default 224.

    Returns:
        Two datasets of (image, label), and the number of classes: for files of TFRecord, 1000.

    Raises:
        FileNotFoundError: If there is neither in `folder`; the message says what was looked for.
        ValueError: If the two have different classes.
    """
    entries = storage.list_folder(folder)
    parts = []
    for names in (_TRAIN, _TEST):
        inner = next((entry.path for entry in entries if entry.isdir and entry.name in names), None)
        records = [
            entry.path
            for entry in entries
            if not entry.isdir and entry.name.startswith(names) and not entry.name.endswith(".xlaindex")
        ]
        if inner is None and not records:
            raise FileNotFoundError(
                f"{folder} has neither a folder {' or '.join(names)} with a folder of images for each class, nor "
                f"TFRecord files whose names begin with one of these"
            )
        transform = image_transform(train=names == _TRAIN, size=size)
        parts.append(_image_folder(inner, transform) if inner is not None else image_records(records, transform))
    train, test = parts
    classes = [getattr(part, "classes", None) for part in parts]
    if classes[0] != classes[1]:
        raise ValueError(f"the training images in {folder} have other classes than the test images")
    return train, test, 1000 if classes[0] is None else len(classes[0])


def _image_folder(folder: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
    datasets = require("torchvision.datasets", "a folder of images", _INSTALL)
    return datasets.ImageFolder(folder, transform)


class _Decoded:
    """A transform after `decode_image`; a class, so that workers that are spawned get it too."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self._transform = transform

    def __call__(self, content: bytes) -> Any:
        return self._transform(decode_image(content))


class _Pair:
    """From the features of a record to (image, label)."""

    def __init__(self, image_key: str, label_key: str, first_label: int) -> None:
        self._image_key, self._label_key, self._first_label = image_key, label_key, first_label

    def __call__(self, sample: dict[str, Any]) -> tuple[Any, int]:
        return sample[self._image_key], int(sample[self._label_key]) - self._first_label
