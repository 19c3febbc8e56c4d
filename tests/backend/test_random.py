"""The device's random numbers: seeds, independence of syncs, state."""

import pytest
import torch

import xlatrainer as xla
from xlatrainer.backend.random import get_rng_state_tensor, set_rng_state_tensor


def _draws(sync: bool = False) -> list[float]:
    values = []
    for _ in range(3):
        values.append(torch.randn(2, device="xla"))
        if sync:
            xla.sync()
    return torch.cat(values).tolist()


def test_torchs_seed_is_the_devices_seed() -> None:
    torch.manual_seed(7)
    first = _draws()
    torch.manual_seed(7)
    assert _draws() == first
    xla.manual_seed(7)
    assert _draws() == first
    assert len(set(first)) == 6
    torch.manual_seed(8)
    assert _draws() != first


def test_draws_do_not_depend_on_where_the_trace_is_cut() -> None:
    torch.manual_seed(1)
    first = _draws()
    torch.manual_seed(1)
    assert _draws(sync=True) == first


def test_a_seed_does_not_reach_draws_recorded_before_it() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3, device="xla").tolist()
    torch.manual_seed(1)
    before = torch.rand(3, device="xla")
    torch.manual_seed(2)
    assert before.tolist() == expected


def test_state_returns_to_a_point() -> None:
    torch.manual_seed(3)
    _draws()
    state = get_rng_state_tensor()
    first = _draws()
    set_rng_state_tensor(state)
    assert _draws() == first
    with torch.random.fork_rng(devices=[0], device_type="xla"):
        inside = _draws()
    assert _draws() == inside
    with pytest.raises(ValueError, match="uint8 tensor of 16 bytes"):
        set_rng_state_tensor(torch.zeros(3))


def test_dropout_differs_from_step_to_step_and_scales() -> None:
    dropout = torch.nn.Dropout(0.25)
    ones = torch.ones(4000, device="xla")
    masks = []
    for _ in range(2):
        dropped = dropout(ones)
        xla.sync()
        masks.append(dropped.cpu())
    assert not torch.equal(*masks)
    for mask in masks:
        torch.testing.assert_close(mask.unique(), torch.tensor([0.0, 4 / 3]))
        assert abs((mask == 0).float().mean().item() - 0.25) < 0.03


def test_dropouts_gradient_uses_the_same_mask() -> None:
    inputs = torch.ones(1000, device="xla", requires_grad=True)
    result = torch.nn.functional.dropout(inputs, 0.5)
    result.sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad.cpu(), result.detach().cpu())


def test_checkpointing_repeats_dropout() -> None:
    inputs = torch.ones(1000, device="xla", requires_grad=True)
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(x, 0.5)
        seen.append(dropped.detach())
        return dropped * x

    torch.utils.checkpoint.checkpoint(block, inputs, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0].cpu(), seen[1].cpu())


def test_generators_of_other_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'xla' device type for generator but found 'cpu'"):
        torch.randn(3, device="xla", generator=torch.Generator())
