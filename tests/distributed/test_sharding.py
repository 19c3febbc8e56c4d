"""Sharded tensors: the same values as on one device, and where they lie."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xlatrainer as xla
from xlatrainer.backend.tensor import storage_data
from xlatrainer.distributed import (
    Mesh,
    ShardingSpec,
    clear_sharding,
    get_sharding_spec,
    mark_sharding,
    mark_sharding_with_gradients,
    visualize_tensor_sharding,
)
from xlatrainer.distributed.sharding import shard_shape


def grid() -> Mesh:
    return Mesh(range(8), (4, 2), ("data", "model"))


def array_of(tensor: Tensor) -> Any:
    value = storage_data(tensor).value
    assert value is not None
    return value.buffer


@pytest.mark.parametrize(
    ("spec", "part", "said"),
    [
        (("data", None), (2, 6), ("data", None)),
        ((None, "model"), (8, 3), (None, "model")),
        ((0, 1), (2, 3), ("data", "model")),
        ((("data", "model"), None), (1, 6), (("data", "model"), None)),
        ((None, None), (8, 6), None),
    ],
)
def test_each_device_has_its_part(spec: Any, part: tuple[int, ...], said: Any) -> None:
    host = torch.randn(8, 6)
    tensor = mark_sharding(host.to("xla"), grid(), spec)
    assert get_sharding_spec(tensor) == said
    assert shard_shape(tensor) == part
    assert {shard.data.shape for shard in array_of(tensor).addressable_shards} == {part}
    assert torch.equal(tensor.cpu(), host)
    assert torch.allclose((tensor @ tensor.t()).cpu(), host @ host.t(), atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "spec", "words"),
    [
        ((8, 6), ("data",), "has 1 entries, and the tensor's shape .* has 2"),
        ((8, 6), ("rows", None), "names the axis 'rows' for dimension 0"),
        ((8, 6), (2, None), "names the axis 2 for dimension 0"),
        ((8, 8), ("data", "data"), "uses the axis 'data' for the dimensions 0 and 1"),
        ((6, 6), ("data", None), "cannot be split into 4 equal parts .* pad it to 8"),
    ],
)
def test_a_spec_that_does_not_fit(shape: tuple[int, ...], spec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mark_sharding(torch.zeros(shape, device="xla"), grid(), spec)


def test_only_tensors_on_the_device() -> None:
    with pytest.raises(ValueError, match="got a tensor on cpu"):
        mark_sharding(torch.zeros(8), grid(), ("data",))


def test_a_parameter_stays_sharded_through_steps() -> None:
    mesh = grid()
    model = nn.Linear(8, 16)
    expected = copy.deepcopy(model)
    model.to("xla")
    mark_sharding(model.weight, mesh, ("data", "model"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    other = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9)
    batch = torch.randn(8, 8)
    seen = []
    for _ in range(5):
        placed = ShardingSpec(mesh, ("data", None)).apply(batch)
        for net, opt, x in ((model, optimizer, placed), (expected, other, batch)):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
        xla.sync()
        seen.append(
            (array_of(model.weight).sharding, array_of(optimizer.state[model.weight]["momentum_buffer"]).sharding)
        )
    assert torch.allclose(model.weight.cpu(), expected.weight, atol=1e-6)
    assert len(set(seen)) == 1
    assert get_sharding_spec(model.weight) == ("data", "model")


def test_steps_do_not_move_what_is_sharded() -> None:
    mesh = grid()
    weight = mark_sharding(torch.randn(16, 16).to("xla"), mesh, ("data", None))
    before = {name: xla.counters.value(name) for name in ("Reshard", "UncachedCompile")}
    for _ in range(4):
        weight.mul_(0.5).add_(weight.sum(1, keepdim=True))
        xla.sync()
    assert xla.counters.value("Reshard") == before["Reshard"]
    assert xla.counters.value("UncachedCompile") == before["UncachedCompile"] + 1


def test_written_through_a_view() -> None:
    tensor = mark_sharding(torch.zeros(8, 4).to("xla"), grid(), ("data", None))
    tensor.view(-1).copy_(torch.arange(32.0))
    tensor[2] = 5.0
    xla.sync()
    assert shard_shape(tensor) == (2, 4)
    assert {shard.data.shape for shard in array_of(tensor).addressable_shards} == {(2, 4)}
    expected = torch.arange(32.0).view(8, 4)
    expected[2] = 5.0
    assert torch.equal(tensor.cpu(), expected)


def test_cleared() -> None:
    tensor = mark_sharding(torch.ones(8, 4).to("xla"), grid(), ("data", None))
    clear_sharding(tensor)
    tensor.add_(1)
    xla.sync()
    assert tensor.sum().item() == 64


def test_an_activation_and_its_gradient() -> None:
    mesh = grid()
    x = torch.randn(8, 4)
    on_device = mark_sharding(x.to("xla"), mesh, ("data", None)).requires_grad_()
    hidden = mark_sharding_with_gradients(on_device * 2, mesh, ("data", "model"))
    assert get_sharding_spec(hidden) == ("data", "model")
    (hidden**2).sum().backward()
    assert on_device.grad is not None
    assert torch.allclose(on_device.grad.cpu(), 8 * x)


def test_marked_in_the_midst_of_a_program() -> None:
    mesh = grid()
    x = torch.randn(8, 4)
    hidden = x.to("xla") + 1
    mark_sharding(hidden, mesh, ("data", None))
    assert torch.equal((hidden * 2).cpu(), (x + 1) * 2)
    assert {shard.data.shape for shard in array_of(hidden).addressable_shards} == {(2, 4)}


def test_a_loader_places_each_shard_directly() -> None:
    mesh = grid()
    before = xla.counters.value("Reshard")
    placed = ShardingSpec(mesh, ("data", None)).apply(torch.arange(16.0).view(8, 2))
    assert xla.counters.value("Reshard") == before
    shards = sorted(array_of(placed).addressable_shards, key=lambda shard: shard.device.id)
    assert [shard.data[0, 0].item() for shard in shards] == [0, 0, 4, 4, 8, 8, 12, 12]
    with pytest.raises(ValueError, match="cannot be split into 4 equal parts"):
        ShardingSpec(mesh, ("data", None)).apply(torch.zeros(6, 2))


def test_what_is_sharded_does_not_go_elsewhere_unasked() -> None:
    tensor = mark_sharding(torch.ones(8, 4).to("xla"), grid(), ("data", None))
    xla.sync()
    mark_sharding(torch.ones(4, 4).to("xla"), Mesh(range(4), (4,), ("data",)), ("data", None))
    with pytest.raises(RuntimeError, match=re.escape("is sharded, ('data', None) of mesh(data=4,model=2)")):
        tensor + 1
    assert tensor.cpu().sum().item() == 32  # it can be read
    with pytest.raises(RuntimeError, match="set_global_mesh"):
        tensor * 2


def test_random_numbers_do_not_depend_on_the_devices() -> None:
    xla.manual_seed(3)
    alone = nn.functional.dropout(torch.ones(16, 8).to("xla"), 0.5).cpu()
    xla.manual_seed(3)
    tensor = mark_sharding(torch.ones(16, 8).to("xla"), grid(), ("data", None))
    assert torch.equal(nn.functional.dropout(tensor, 0.5).cpu(), alone)


def test_a_failed_check_is_raised() -> None:
    table = mark_sharding(torch.randn(16, 4).to("xla"), grid(), ("data", None))
    index = ShardingSpec(grid(), ("data",)).apply(torch.tensor([0, 1, 2, 3, 4, 17, 6, 7]))
    with pytest.raises(IndexError, match="17"):
        torch.nn.functional.embedding(index, table).cpu()


def test_drawn() -> None:
    tensor = mark_sharding(torch.zeros(8, 6).to("xla"), grid(), ("data", "model"))
    text = visualize_tensor_sharding(tensor)
    lines = text.splitlines()
    assert "CPU 0" in lines[1]
    assert "CPU 1" in lines[1]
    assert "CPU 7" in lines[-2]
    assert len(lines) == 9
