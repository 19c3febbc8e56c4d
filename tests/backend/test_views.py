"""Views, in-place updates and aliasing, with gradients, against CPU torch: fixed cases and random chains."""

import random
from collections.abc import Callable

import pytest
import torch

import xlatrainer as xla

Program = Callable[[torch.Tensor], torch.Tensor]


MULTIPLE = ["split", "chunk", "unbind"]  # autograd forbids to update what these return
SINGLE = ["transpose", "select", "slice", "view", "diagonal", "unsqueeze", "narrow", "flatten", "permute", "as_strided"]
SINGLE += ["squeeze", "movedim", "reshape"]


def _chain(seed: int, kinds: list[str]) -> Program:
    """A random program of views and in-place updates on a 2 x 3 x 4 tensor; the same on every device."""

    def run(base: torch.Tensor) -> torch.Tensor:
        rng = random.Random(seed)
        pool = [base]
        for _ in range(rng.randint(3, 9)):
            tensor = rng.choice(pool)
            if rng.random() < 0.6:
                pool.append(_view(tensor, rng, kinds))
            else:
                _update(tensor, rng)
        return torch.cat([tensor.reshape(-1) for tensor in pool])

    return run


def _view(tensor: torch.Tensor, rng: random.Random, kinds: list[str]) -> torch.Tensor:
    dims = tensor.dim()
    if dims == 0:
        return tensor.unsqueeze(0)
    dim = rng.randrange(dims)
    size = tensor.shape[dim]
    kind = rng.choice(kinds)
    if kind == "transpose":
        return tensor.transpose(dim, rng.randrange(dims))
    if kind == "permute":
        return tensor.permute(rng.sample(range(dims), dims))
    if kind == "movedim":
        return tensor.movedim(dim, rng.randrange(dims))
    if kind == "select" and size:
        return tensor.select(dim, rng.randrange(-size, size))
    if kind == "slice" and size:
        start = rng.randrange(size)
        return tensor[(slice(None),) * dim + (slice(start, None, rng.choice([1, 2])),)]
    if kind == "narrow" and size:
        start = rng.randrange(size)
        return tensor.narrow(dim, start, rng.randint(1, size - start))
    if kind == "view" and tensor.is_contiguous():
        return tensor.view(-1)
    if kind == "diagonal" and dims >= 2:
        return tensor.diagonal(rng.choice([-1, 0, 1]), 0, dims - 1)
    if kind == "unsqueeze" and dims < 5:
        return tensor.unsqueeze(dim)
    if kind == "squeeze":
        return tensor.squeeze()
    if kind == "split" and size:
        return rng.choice(tensor.split(2, dim))
    if kind == "chunk" and size:
        return rng.choice(tensor.chunk(2, dim))
    if kind == "unbind" and size:
        return rng.choice(tensor.unbind(dim))
    if kind == "as_strided" and tensor.numel() >= 3 and tensor.is_contiguous():
        return tensor.as_strided((3,), (1,), tensor.storage_offset())
    if kind == "flatten":
        return tensor.flatten()
    return tensor.reshape(tensor.shape)


def _update(tensor: torch.Tensor, rng: random.Random) -> None:
    kind = rng.choice(["add_", "mul_", "copy_", "setitem", "neg_", "other", "exp"])
    number = rng.choice([0.5, -1.25, 2.0])
    if kind == "add_":
        tensor.add_(number)
    elif kind == "mul_":
        tensor.mul_(number)
    elif kind == "copy_":
        tensor.copy_(torch.full(tensor.shape, number, device=tensor.device))
    elif kind == "setitem" and tensor.dim():
        tensor[0] = number
    elif kind == "neg_":
        tensor.neg_()
    elif kind == "other" and tensor.dim():
        tensor.add_(tensor.sum(0).detach() * 0.1)
    else:
        tensor.sub_(0.75)


def _values(program: Program, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the program returns, and the gradient of its weighted sum at its input."""
    generator = torch.Generator().manual_seed(seed)
    leaf = torch.randn(2, 3, 4, generator=generator).to(device).requires_grad_()
    result = program(leaf * 1.0)
    weights = torch.linspace(-1, 1, result.numel()).to(device)
    (result.flatten() * weights).sum().backward()
    assert leaf.grad is not None
    return result.detach().cpu(), leaf.grad.cpu()


def _compare(program: Program, seed: int = 0) -> None:
    expected, expected_grad = _values(program, "cpu", seed)
    result, grad = _values(program, "xla", seed)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("block", range(10))
def test_random_chains_agree_with_the_cpu(block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        _compare(_chain(seed, SINGLE), seed)


@pytest.mark.parametrize("block", range(5))
def test_random_chains_without_gradients_agree_with_the_cpu(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        base = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
        program = _chain(seed, SINGLE + MULTIPLE * 2)
        on_xla = base.to("xla")
        torch.testing.assert_close(program(on_xla).cpu(), program(base))
        torch.testing.assert_close(on_xla.cpu(), base)


def _in_place(view: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    def run(base: torch.Tensor) -> torch.Tensor:
        view(base).mul_(3.0).add_(1.0)
        return base

    return run


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "select": lambda t: t.select(1, 2),
    "select negative": lambda t: t[..., -1],
    "slice": lambda t: t[:, 1:, ::2],
    "transpose": lambda t: t.transpose(0, 2),
    "permute": lambda t: t.permute(2, 0, 1),
    "view": lambda t: t.view(6, 4),
    "view of a slice": lambda t: t[1].view(-1),
    "diagonal": lambda t: t.diagonal(0, 1, 2),
    "as_strided": lambda t: t.as_strided((2, 3), (12, 1), 2),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t.unsqueeze(1).squeeze(1),
    "unflatten": lambda t: t.flatten().unflatten(0, (4, 6)),
    "view_as": lambda t: t.view_as(t),
    "real of complex": lambda t: torch.view_as_real(torch.view_as_complex(t.view(2, 3, 2, 2))),
    "chain": lambda t: t.transpose(0, 1)[1:].select(2, 3).unsqueeze(0).diagonal(0, 1, 2),
    "expand then select": lambda t: t.unsqueeze(0).expand(2, 2, 3, 4)[1, 0],
    "unfold without overlap": lambda t: t.unfold(2, 2, 2).select(2, 1),
    "T of a matrix": lambda t: t[0].t(),
    "detach": lambda t: t,
}


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_in_place_through_a_view_reaches_its_base(name: str) -> None:
    _compare(_in_place(VIEWS[name]))


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "unfold with overlap": lambda t: t.unfold(2, 3, 1),
    "expand": lambda t: t.select(1, 0).unsqueeze(1).expand(2, 5, 4),
    "as_strided with overlap": lambda t: t.as_strided((4, 4), (2, 1), 1),
    "transposed copy": lambda t: t.transpose(0, 2).contiguous().add_(1),
    "reshape that copies": lambda t: t.transpose(0, 2).reshape(-1).mul_(2),
}


@pytest.mark.parametrize("name", sorted(READS))
def test_reading_through_a_view(name: str) -> None:
    _compare(READS[name])


@pytest.mark.parametrize("method", ["split", "chunk", "unbind"])
def test_one_of_several_views(method: str) -> None:
    def view(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unbind(1)[1] if method == "unbind" else getattr(tensor, method)(2, 1)[1]

    _compare(lambda base: view(base) * 2)
    base = torch.arange(24.0).reshape(2, 3, 4)
    on_xla = base.to("xla")
    view(base).mul_(3)
    view(on_xla).mul_(3)
    torch.testing.assert_close(on_xla.cpu(), base)
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError, match="returns multiple views"):
            _in_place(view)(torch.ones(2, 3, 4, device=device, requires_grad=True) * 1)


def test_a_copy_does_not_alias_its_source() -> None:
    for program in (READS["transposed copy"], READS["reshape that copies"]):
        base = torch.arange(24.0, device="xla").reshape(2, 3, 4)
        program(base)
        torch.testing.assert_close(base.cpu(), torch.arange(24.0).reshape(2, 3, 4))


def test_views_see_later_writes_to_their_base_across_a_sync() -> None:
    base = torch.zeros(3, 4, device="xla")
    column, transposed, detached = base[:, 1], base.t(), base.detach()
    base.add_(1)
    xla.sync()
    column.add_(2)
    detached[0] = 7
    expected = torch.ones(3, 4)
    expected[:, 1] = 3
    expected[0] = 7
    torch.testing.assert_close(base.cpu(), expected)
    torch.testing.assert_close(transposed.cpu(), expected.t())
    torch.testing.assert_close(column.cpu(), expected[:, 1])


def test_strides_and_errors_are_torchs() -> None:
    tensor = torch.zeros(3, 4, device="xla")
    assert tensor.t().stride() == (1, 4)
    assert not tensor.t().is_contiguous()
    assert tensor[1:, ::2].storage_offset() == 4
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        tensor.t().view(12)
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        tensor.as_strided((13,), (1,))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        torch.nn.Parameter(tensor).add_(1)


def test_the_bytes_of_a_tensor_in_another_dtype() -> None:
    numbers = torch.tensor([1.0, -2.5, 0.0, 3e10])
    for dtype in (torch.int32, torch.int16, torch.uint8, torch.int64):
        on_xla = numbers.to("xla").view(dtype)
        torch.testing.assert_close(on_xla.cpu(), numbers.view(dtype))
    target = numbers.to("xla")
    target.view(torch.int32)[1] = 0
    assert target.cpu()[1] == 0
    assert target.cpu()[0] == 1


def test_data_and_resize_and_set() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3).to("xla"))
    parameter.data = torch.zeros(4, device="xla")
    assert parameter.shape == (4,)
    parameter.data.add_(2)
    assert parameter.tolist() == [2, 2, 2, 2]
    grown = torch.arange(4.0, device="xla").resize_(2, 3)
    assert grown.flatten()[:4].tolist() == [0, 1, 2, 3]
    other = torch.empty(0, device="xla").set_(grown)
    other.fill_(5)
    assert grown.sum().item() == 30
    turned = torch.arange(6.0, device="xla").view(2, 3)
    turned.t_()
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "stride"), [((2, 3), (1, 2)), ((2, 3), (6, 1)), ((1, 3), (7, 1)), ((2, 3), (0, 1))])
def test_copies_have_the_strides_that_torch_gives_them(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> None:
    source = torch.arange(12.0).as_strided(size, stride)
    expected = source.to(dtype, copy=True)
    there = source.to("xla", dtype)
    back = torch.arange(12.0).to("xla").as_strided(size, stride).to("cpu", dtype)
    moved = torch.arange(12.0).to("xla").as_strided(size, stride).to(dtype, copy=True)
    for copy in (there, back, moved):
        assert copy.stride() == expected.stride()
        assert copy.dtype is dtype
        torch.testing.assert_close(copy.cpu(), expected)


def test_gradients_go_through_copies_between_devices() -> None:
    source = torch.ones(3, requires_grad=True)
    (source.to("xla", torch.float64).to("cpu", torch.float32) * 2).sum().backward()
    assert source.grad is not None
    assert source.grad.dtype is torch.float32
    assert source.grad.tolist() == [2, 2, 2]


def test_channels_last_is_a_layout_like_any() -> None:
    source = torch.randn(2, 3, 4, 5)
    tensor = source.to("xla").to(memory_format=torch.channels_last)
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(tensor.cpu(), source)
    tensor[:, 1].mul_(2)
    source[:, 1].mul_(2)
    torch.testing.assert_close(tensor.cpu(), source)
