"""Which process this is: by torch.distributed, by the launcher, or alone."""

import pytest
import torch

from xlatrainer import config
from xlatrainer.data import TfRecordIterableDataset
from xlatrainer.data.replicas import is_writer, replica


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert replica() == (0, 1)
    assert is_writer(master_only=True, global_master=True)


def test_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with config.override(rank=2, world_size=3, local_rank=0):
        assert replica() == (2, 3)
        assert is_writer(master_only=True, global_master=False)
        assert not is_writer(master_only=True, global_master=True)
        with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
            TfRecordIterableDataset("file", rank=2, world_size=2)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        assert replica() == (0, 2)
