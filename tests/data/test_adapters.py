"""What can be gone through in batches, and the advice for what cannot. Most refusals: tests/trainer/test_trainer.py."""

import pytest
import torch

from xlatrainer.data.adapters import as_batches, is_one_shot, rows_as_batches


def test_batches_are_passed_on_untouched() -> None:
    batches = [(torch.zeros(1), torch.zeros(1))]
    assert as_batches(batches, argument="data") is batches
    assert as_batches((batches[0], batches[0]), argument="data") == (batches[0], batches[0])


def test_the_argument_is_named() -> None:
    with pytest.raises(TypeError, match="^validation_data must be a DataLoader"):
        as_batches(None, argument="validation_data")


def test_one_shot() -> None:
    assert is_one_shot(iter([1]))
    assert is_one_shot(x for x in [1])
    assert not is_one_shot([1])


def test_rows() -> None:
    rows = torch.arange(10).reshape(5, 2)
    assert [batch.tolist() for batch in rows_as_batches(rows, 3)] == [rows[:3].tolist(), rows[3:].tolist()]
    assert len(rows_as_batches(rows.numpy(), 5)) == 1
    with pytest.raises(ValueError, match=r"at least one row to predict; got a tensor of shape \(\)"):
        rows_as_batches(torch.tensor(1.0), 3)
