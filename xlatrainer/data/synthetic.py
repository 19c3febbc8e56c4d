"""Data that is made up: the same batch again and again, batches of a function, images with labels.

To measure a training without its input, or to run a recipe without its dataset.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from xlatrainer.data.prefetch import checked_count

__all__ = ["FakeImages", "FnDataGenerator", "SampleGenerator"]


class SampleGenerator:
    """The same object so many times, in each pass.

    Args:
        data: What is handed out, a batch say: itself, not a copy.
        sample_count: How many times, at least 1.

    Example:
        >>> samples = SampleGenerator(("x", "y"), 2)
        >>> len(samples), list(samples)
        (2, [('x', 'y'), ('x', 'y')])
    """

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data = data
        self._sample_count = checked_count("sample_count", sample_count)

    def __len__(self) -> int:
        return self._sample_count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._sample_count):
            yield self._data


class FnDataGenerator:
    """Batches of random inputs and a function of them, new ones in each pass.

    Args:
        func: Makes the targets from the inputs.
        batch_size: Rows in a batch, at least 1.
        gen_tensor: Makes inputs of the shape that it is called with; default `torch.randn`.
        dims: The shape of a row; default None, which means (1,).
        count: Batches in a pass, at least 1; default 1.

    Example:
        >>> batches = FnDataGenerator(lambda x: x * 2, 4, dims=[3], count=2)
        >>> [(inputs.shape, bool((targets == 2 * inputs).all())) for inputs, targets in batches]
        [(torch.Size([4, 3]), True), (torch.Size([4, 3]), True)]
    """

    def __init__(
        self,
        func: Callable[[Any], Any],
        batch_size: int,
        gen_tensor: Callable[..., Any] = torch.randn,
        dims: Sequence[int] | None = None,
        count: int = 1,
    ) -> None:
        self._func = func
        self._shape = (checked_count("batch_size", batch_size), *(dims or (1,)))
        self._gen_tensor = gen_tensor
        self._count = checked_count("count", count)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for _ in range(self._count):
            inputs = self._gen_tensor(*self._shape)
            yield inputs, self._func(inputs)


class FakeImages(Dataset[tuple[Tensor, int]]):
    """Images of noise with labels, the same for the same arguments, which cost next to nothing to make.

    An example is (image, label). Images are windows into one stretch of noise, each at a place of its own, and share
    its memory: do not write into them.

    Args:
        shape: Of an image: (channels, height, width).
        classes: How many there are: labels are from 0 to classes - 1.
        count: How many examples, at least 1; default 1280.
        dtype: Of the images: a floating dtype gives normal noise (mean 0, deviation 1), `torch.uint8` values from 0 to
            255. Default float32.
        seed: Of noise and labels; default 0.

    Raises:
        ValueError: For a shape that is not of three positive numbers, numbers below 1, and another dtype.

    Example:
        >>> image, label = FakeImages((3, 32, 32), 10)[0]
        >>> image.shape, 0 <= label < 10
        (torch.Size([3, 32, 32]), True)
    """

    is_deterministic = True

    def __init__(
        self,
        shape: Sequence[int] = (3, 224, 224),
        classes: int = 1000,
        *,
        count: int = 1280,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self._shape = torch.Size(shape)
        if len(self._shape) != 3 or min(self._shape) < 1:
            raise ValueError(f"shape must be (channels, height, width), got {tuple(shape)}")
        self.classes = checked_count("classes", classes)
        self._count = checked_count("count", count)
        generator = torch.Generator().manual_seed(seed)
        length = self._shape.numel() + self._count - 1
        if dtype is torch.uint8:
            self._noise = torch.randint(0, 256, (length,), dtype=dtype, generator=generator)
        elif dtype.is_floating_point:
            self._noise = torch.randn(length, generator=generator).to(dtype)
        else:
            raise ValueError(f"dtype must be a floating one or torch.uint8, got {dtype}")
        self._labels = torch.randint(0, self.classes, (self._count,), generator=generator).tolist()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -self._count <= index < self._count:
            raise IndexError(f"there are {self._count} images; there is none of index {index}")
        index %= self._count
        return self._noise[index : index + self._shape.numel()].view(self._shape), self._labels[index]
