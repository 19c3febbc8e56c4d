"""Several processes over one DataLoader: each loads its own rows, and goes on from a position without those before."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from xlatrainer.data.position import ResumableBatches
from xlatrainer.data.process_share import PartOfBatch, share_of


class Watched(Dataset[torch.Tensor]):
    """Knows what it was asked for; with random numbers unless it is deterministic."""

    def __init__(self, is_deterministic: bool = True) -> None:
        self.is_deterministic = is_deterministic
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor(float(index)) + (0 if self.is_deterministic else torch.rand(()))


def batches_of(data: Watched, index: int) -> ResumableBatches:
    """The batches of process `index` of two with two devices each."""
    loader = DataLoader(data, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3))
    return ResumableBatches(share_of(loader, index, 2, 4))


def rows(parts: list[PartOfBatch]) -> list[tuple[list[float], int | None]]:
    return [(part.batch.tolist(), part.rows) for part in parts]


def test_the_parts_are_the_batch_with_its_last_row_repeated() -> None:
    sets = [Watched(), Watched()]
    first, second = (rows(list(batches_of(data, index))) for index, data in enumerate(sets))
    loader = DataLoader(Watched(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3))
    for (mine, count), (others, same), whole in zip(first, second, loader, strict=True):
        assert count == same == len(whole)
        assert mine + others == whole.tolist() + [float(whole[-1])] * (-len(whole) % 4)
    assert [len(data.asked) for data in sets] == [14, 14]  # of 3 x 8 and 4 rows


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_what_was_drawn_is_loaded_again_only_if_it_may_be_random(index: int, is_deterministic: bool) -> None:
    parts = batches_of(Watched(is_deterministic), index)
    iterator = iter(parts)
    for _ in range(2):
        next(iterator)
    state: dict[str, Any] = parts.state_dict()
    expected = rows(list(iterator))
    data = Watched(is_deterministic)
    again = batches_of(data, index)
    again.load_state_dict(state)
    assert rows(list(again)) == expected
    assert len(data.asked) == (6 if is_deterministic else 14)
