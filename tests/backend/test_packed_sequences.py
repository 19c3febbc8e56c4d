"""Packing and padding of sequences against CPU torch: values, first and second gradients, errors."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from xlatrainer.backend import counters


def _both(function: Any, rows: Tensor) -> None:
    expected = function(rows)
    counters.reset()
    actual = function(rows.to("xla"))
    assert not [name for name in counters.snapshot() if name.startswith("aten::")]
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [[5, 3, 3, 1], [4, 4, 4, 4], [2, 1, 1, 1]])
@pytest.mark.parametrize("features", [(), (3,), (3, 2)])
def test_there_and_back(lengths: list[int], batch_first: bool, features: tuple[int, ...]) -> None:
    def run(rows: Tensor) -> list[Tensor]:
        rows = rows.detach().requires_grad_()
        packed = pack_padded_sequence(rows, lengths, batch_first=batch_first)
        padded, own = pad_packed_sequence(packed, batch_first, padding_value=0.5, total_length=6)
        first = torch.autograd.grad((padded**3).sum() + (packed.data**2).sum(), rows, create_graph=True)[0]
        second = torch.autograd.grad((first**2).sum(), rows)[0]
        assert not packed.batch_sizes.is_xla
        return [packed.data, packed.batch_sizes, padded, own, first, second]

    _both(run, torch.randn(4, 5, *features) if batch_first else torch.randn(5, 4, *features))


def test_without_gradients_and_of_integers() -> None:
    def run(rows: Tensor) -> list[Tensor]:
        packed = pack_padded_sequence(rows, [5, 2], batch_first=True)
        with torch.inference_mode():
            inside = pack_padded_sequence(rows.float(), [5, 2], batch_first=True)
            padded = pad_packed_sequence(inside)[0]
        return [packed.data, inside.data, padded, pad_packed_sequence(packed, padding_value=7)[0]]

    _both(run, torch.arange(10).reshape(2, 5))


def test_sequences_of_their_own() -> None:
    def run(rows: Tensor) -> list[Tensor]:
        packed = pack_sequence([rows[:2], rows[:5], rows[1:4]], enforce_sorted=False)
        assert packed.sorted_indices is not None
        return [packed.data, packed.sorted_indices, pad_packed_sequence(packed)[0]]

    _both(run, torch.randn(6, 3))


@pytest.mark.parametrize("lengths", [[5, 3], [3, 5, 1], [5, 1, 0]])
def test_wrong_lengths(lengths: list[int]) -> None:
    errors = []
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError) as raised:
            pack_padded_sequence(torch.randn(5, 3, 2).to(device), lengths)
        errors.append(str(raised.value).split("\n")[0])
    assert errors[0] == errors[1]


def test_wrong_batch_sizes() -> None:
    errors = []
    for device in ("cpu", "xla"):
        packed = PackedSequence(torch.randn(5, 2).to(device), torch.tensor([3, 2]))
        with pytest.raises(ValueError, match="Expected total_length") as raised:
            pad_packed_sequence(packed, total_length=1)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
