"""How models are called and examples counted."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from xlatrainer.trainer.steps import call_model, rows_of

Pair = namedtuple("Pair", ["a", "b"])


class Recorder(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_call_model() -> None:
    model = Recorder()
    assert call_model(model, {"a": 1}) == ((), {"a": 1})
    assert call_model(model, (1, 2)) == ((1, 2), {})
    assert call_model(model, Pair(1, 2)) == ((1, 2), {})
    assert call_model(model, 3) == ((3,), {})


@pytest.mark.parametrize(
    ("target", "count"), [(torch.zeros(5, 2), 5), ({"a": torch.zeros(5), "b": torch.zeros(3)}, 5), (None, 7)]
)
def test_examples_are_counted_by_rows(target: Any, count: int) -> None:
    assert rows_of((torch.ones(7, 2), target)) == count
