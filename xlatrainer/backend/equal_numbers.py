"""Which lifted numbers of a program are one and the same.

XLA compiles equal kernels once. A kernel that reads the fifth number is another one than that which reads the sixth, so
numbers that were equal when the program was made are read from one place: the momentum of 53 batch norms, the 1 that
each of them counts with. A program holds for equal ones only; see `Program.tell_apart`.

May import: nothing of the package.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["EqualNumbers"]


class EqualNumbers:
    """Numbers that stand for later ones of the same bits.

    Zeros stand for themselves alone: much that differs later begins as zero, such as the learning rates of a warmup.

    Attributes:
        floats: for each float the position of the first that equals it.
        ints: the same for the ints.
    """

    def __init__(self, floats: Sequence[float], ints: Sequence[int]) -> None:
        self.floats = _firsts(np.array(floats, np.float64))
        self.ints = _firsts(np.array(ints, np.int64))

    @classmethod
    def among(cls, floats: Sequence[float], ints: Sequence[int]) -> "EqualNumbers | None":
        """Those of these numbers; None if no two of them are equal."""
        found = cls(floats, ints)
        alone = all((each == np.arange(len(each))).all() for each in (found.floats, found.ints))
        return None if alone else found

    def hold(self, floats: ArrayLike, ints: ArrayLike) -> bool:
        """Whether the numbers of another run are equal where these were."""
        return _holds(self.floats, np.asarray(floats, np.float64)) and _holds(self.ints, np.asarray(ints, np.int64))

    @property
    def text(self) -> str:
        """All of it, for the identity of a program."""
        return f"{self.floats.tolist()} {self.ints.tolist()}"


def _bits(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    return numbers.view(np.int64)  # -0.0 is not 0.0, a NaN is itself


def _firsts(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    first: dict[int, int] = {}
    bits = _bits(numbers).tolist()
    places = [index if not numbers[index] else first.setdefault(value, index) for index, value in enumerate(bits)]
    return np.array(places, np.int64)


def _holds(firsts: "np.ndarray[Any, Any]", numbers: "np.ndarray[Any, Any]") -> bool:
    bits = _bits(numbers)
    return bool((bits[firsts] == bits).all())
