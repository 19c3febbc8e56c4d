"""Factorisations, histograms, segments and the like at their edges, against CPU torch and without the CPU's help."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from xlatrainer.backend import counters

# What torch has no meta kernel to refuse is refused by the CPU, which an operator announces.
pytestmark = pytest.mark.filterwarnings("ignore:.*runs on the CPU:RuntimeWarning")

INF, NAN = float("inf"), float("nan")


def _assert_same(function: Callable[..., Any], *inputs: Any, tolerance: float = 1e-5) -> None:
    expected = function(*inputs)
    counters.reset()
    actual = function(*(x.to("xla") if isinstance(x, torch.Tensor) else x for x in inputs))
    assert not [name for name in counters.snapshot() if name.startswith("aten::")]
    actual, expected = (tree_map(lambda x: x.detach().cpu(), tuple(r)) for r in ((actual,), (expected,)))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def _matrix(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(107, 96), (31, 45)], ids=str)
def test_images_of_float64_are_resized_in_float64(mode: str, size: tuple[int, int]) -> None:
    """Which pixel is the nearest, and by how much, is not for float32 to say: 96 to 107 rows picks others there."""
    image = _matrix(2, 3, 96, 112).double().requires_grad_()
    on_xla = image.detach().to("xla").requires_grad_()
    expected, result = (torch.nn.functional.interpolate(x, size, mode=mode) for x in (image, on_xla))
    torch.testing.assert_close(result.detach().cpu(), expected.detach(), rtol=1e-12, atol=1e-12)
    if mode == "nearest":  # whose gradient the CPU computes with places in float32, which are not those of its forward
        return
    expected.square().sum().backward()
    result.square().sum().backward()
    assert image.grad is not None
    assert on_xla.grad is not None
    torch.testing.assert_close(on_xla.grad.cpu(), image.grad, rtol=1e-11, atol=1e-11)


def test_frexp_of_subnormal_and_infinite_numbers() -> None:
    numbers = [0.0, -0.0, 1.0, -3.0, INF, -INF, NAN, 1e-38, -1e-42, 3e38]
    _assert_same(torch.frexp, torch.tensor(numbers))
    _assert_same(torch.frexp, torch.tensor([*numbers, 1e-310], dtype=torch.float64))
    _assert_same(torch.frexp, torch.tensor([1.0, 1e-7, INF, NAN], dtype=torch.float16))


def test_mode_with_nan_and_without_elements() -> None:
    rows = torch.tensor([[3.0, 1, 1, 3, 2], [NAN, NAN, 1, 0, 0], [NAN] * 5, [INF, INF, 1, 2, 3]])
    for x in (rows, torch.zeros(0, 3), torch.tensor(3.0), torch.tensor([1, 2, 2, 3, 3])):
        _assert_same(torch.mode, x)
    with pytest.raises(IndexError, match="non-zero size"):
        torch.mode(torch.zeros(3, 0, device="xla"))


X = _matrix(200)
HISTOGRAMS = {
    "range": (lambda x: torch.histc(x, 7, -1, 1), X),
    "no elements": (torch.histc, torch.zeros(0)),
    "equal elements": (lambda x: torch.histc(x, 5), torch.ones(4)),
    "outside": (lambda x: torch.histc(x, 4, 0, 3), torch.tensor([NAN, 1.0, 2, INF])),
    "density": (lambda x: torch.histogram(x, 11, weight=x.abs(), density=True), X),
    "edges": (torch.histogram, X, torch.tensor([-1.0, 0, 0.3, 2])),
    "edges of nothing": (lambda x: torch.histogram(x, 3), torch.zeros(0)),
    "last edge": (lambda x: torch.histogram(x, 3, range=(0.0, 1.0)), torch.tensor([NAN, 0.5, 1, 0])),
    "two dims": (lambda x: torch.histogramdd(x, [3, 4])[0], X.view(-1, 2)),
}


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histogram(name: str) -> None:
    _assert_same(*HISTOGRAMS[name])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers_are_counted_as_on_gpus(dtype: torch.dtype) -> None:
    """The CPU refuses them, and transformers asks for them on every other device."""
    numbers = torch.tensor([0, 1, 1, 3, 7, 2, 1])
    counts = torch.histc(numbers.to("xla", dtype), bins=4, min=0, max=3)
    assert counts.dtype is dtype
    assert counts.tolist() == torch.histc(numbers.float(), bins=4, min=0, max=3).tolist() == [1, 3, 1, 1]


@pytest.mark.parametrize("driver", [None, "gels", "gelsy"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 5, 3)], ids=str)
def test_lstsq(shape: tuple[int, ...], driver: str | None) -> None:
    def solve(a: torch.Tensor, b: torch.Tensor) -> Any:
        return tuple(torch.linalg.lstsq(a, b, driver=driver))

    _assert_same(solve, _matrix(*shape), _matrix(*shape[:-1], 2))
    _assert_same(solve, _matrix(*shape), _matrix(*shape[:-1]))


def test_lstsq_of_low_rank_and_of_mistakes() -> None:
    _assert_same(lambda a, b: tuple(torch.linalg.lstsq(a, b)), torch.ones(5, 3), _matrix(5, 2))
    with pytest.raises(RuntimeError, match="should match"):
        torch.linalg.lstsq(_matrix(5, 3).to("xla"), _matrix(4, 2).to("xla"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_factorisations(dtype: torch.dtype) -> None:
    tall, square = _matrix(2, 5, 3, dtype=dtype), _matrix(2, 4, 4, dtype=dtype)
    positive = square @ square.mH + torch.eye(4)
    _assert_same(lambda a: tuple(torch.geqrf(a)), tall)
    _assert_same(lambda a: tuple(torch.linalg.polar(a)), tall)
    _assert_same(torch.linalg.matrix_sqrth, positive, tolerance=1e-4)
    _assert_same(torch.linalg.eigvals, square, tolerance=1e-4)
    reflectors, factors = torch.geqrf(tall)
    for left in (True, False):
        for transpose in (True, False):
            options = (left, transpose)
            _assert_same(
                lambda a, t, c, o=options: torch.ormqr(a, t, c, *o), reflectors, factors, _matrix(2, 5, 5, dtype=dtype)
            )


def test_eigenvectors_belong_to_their_values() -> None:
    matrix = _matrix(3, 4, 4).to("xla")
    values, vectors = torch.linalg.eig(matrix)
    torch.testing.assert_close(matrix.cfloat() @ vectors, vectors * values[:, None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("initial", [None, 1.0])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segments(reduce: str, initial: float | None) -> None:
    def reduced(data: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data = data.detach().requires_grad_()
        options = {"lengths": lengths, "axis": lengths.dim() - 1, "initial": initial, "unsafe": True}
        result = torch.segment_reduce(data, reduce, **options)
        heads = torch.arange(1.0, 1 + result.numel(), device=result.device).view(result.shape)
        return result, *torch.autograd.grad((result.nan_to_num(0, 0, 0) * heads).sum(), data)

    lengths = torch.tensor([3, 0, 2, 4])
    _assert_same(reduced, torch.tensor([1.0, 2, 2, 0, -1, 3, 0, 0, 4]), lengths)
    _assert_same(reduced, torch.tensor([1.0, NAN, 2, 0, -1, NAN, NAN, 0, 4]), lengths)
    _assert_same(reduced, _matrix(2, 6), torch.tensor([[1, 2, 3], [3, 3, 0]]))


def test_places_of_what_is_not_zero() -> None:
    for size in (0, 2, 4):
        _assert_same(
            lambda x, s=size: torch.nonzero_static(x, size=s, fill_value=7), torch.tensor([[1, 0, 2], [0, 3, 0]])
        )
    _assert_same(lambda x: torch.nonzero_static(x, size=3), torch.zeros(0, 2))


def test_equal_reads_one_truth_value() -> None:
    x = _matrix(4, 3)
    others = (x.clone(), x + 1, x[:3], x.double(), x > 0, torch.full_like(x, NAN))
    for other in others:
        counters.reset()
        assert torch.equal(x.to("xla"), other.to("xla")) == torch.equal(x, other)
        assert not [name for name in counters.snapshot() if name.startswith("aten::")]
    assert not torch.equal(torch.full((2,), NAN, device="xla"), torch.full((2,), NAN, device="xla"))
    with pytest.raises(RuntimeError, match="one device"):
        torch.equal(x.to("xla"), x)


def _learned_quantization(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Any:
    inputs = [tensor.clone().requires_grad_() for tensor in (x, scale, zero)]
    if scale.numel() > 1:
        result = torch._fake_quantize_learnable_per_channel_affine(*inputs, 1, -8, 7, 0.5)
    else:
        result = torch._fake_quantize_learnable_per_tensor_affine(*inputs, -8, 7, 0.5)
    return result, torch.autograd.grad((result * result).sum(), inputs)


def test_fake_quantization_that_is_learned() -> None:
    x = _matrix(9, 3) * 2
    _assert_same(_learned_quantization, x, torch.tensor([0.1]), torch.tensor([0.6]), tolerance=1e-4)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.6, 0.0, 1.0])
    _assert_same(_learned_quantization, x, scales, zeros, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int8, torch.int64, torch.bool])
def test_hash_tensor(dtype: torch.dtype) -> None:
    x = (_matrix(3, 4) * 5).to(dtype)
    _assert_same(torch.hash_tensor, x)
    _assert_same(lambda x: torch.hash_tensor(x, dim=1, keepdim=True), x)


@pytest.mark.parametrize("options", [(16,), (16, False), (5, True, 3.0), (1,), (0,)], ids=str)
def test_kaiser_window(options: tuple[Any, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        _assert_same(lambda x, d=dtype: torch.kaiser_window(*options, dtype=d, device=x.device), X)


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch compiles decompositions at the first forward-mode derivative
def test_derivatives_of_gates() -> None:
    x, change = _matrix(3, 4), _matrix(4, 3).t()
    _assert_same(lambda x, dx: torch.func.jvp(lambda t: torch.nn.functional.glu(t, 1), (x,), (dx,)), x, change)
    backward = torch.ops.aten.glu_backward_jvp
    _assert_same(
        lambda g, x, dg, dx: backward(torch.ops.aten.glu_backward(g, x, 1), g, x, dg, dx, 1),
        _matrix(3, 2),
        x,
        _matrix(2, 3).t(),
        change,
    )


def test_masked_softmax() -> None:
    scores, mask = _matrix(2, 3, 5, 5), _matrix(2, 3, 5, 5) > 0
    mask[0, 0, 0] = True
    masked, backward = torch.ops.aten._masked_softmax, torch.ops.aten._masked_softmax_backward
    _assert_same(lambda s, m: masked(s, m, 3, 2), scores, mask)
    _assert_same(lambda s, m: masked(s, m, 1, 2), scores, mask)
    _assert_same(lambda s, m: masked(s, m, 3, 0), scores, mask[0, 1])
    _assert_same(lambda s, m: masked(s, m, 3, 1), scores, mask[0, 1, :2])
    mask[0, 0, 0] = False
    _assert_same(lambda g, s, m: backward(g, masked(s, m, 3, 2), m, 3), _matrix(2, 3, 5, 5) * 2, scores, mask)


@pytest.mark.parametrize(
    ("shape", "dim", "mask_type"),
    [
        ((2, 5), 3, 0),
        ((5, 5), 3, 1),
        ((5, 5), 3, 2),
        ((3, 5, 5), 3, 0),
        ((5, 5), 3, None),
        ((5, 5), 3, 3),
        ((2, 3, 5, 5), 4, 2),
    ],
)
def test_masks_that_the_cpu_refuses(shape: tuple[int, ...], dim: int, mask_type: int | None) -> None:
    scores, mask = _matrix(2, 3, 5, 5), _matrix(*shape) > 0
    with pytest.raises((RuntimeError, IndexError)) as expected:
        torch.ops.aten._masked_softmax(scores, mask, dim, mask_type)
    scores, mask = scores.to("xla"), mask.to("xla")
    with pytest.raises(expected.type, match=re.escape(str(expected.value).partition("\n")[0])):
        torch.ops.aten._masked_softmax(scores, mask, dim, mask_type)


def test_small_remainders() -> None:
    x, whole = _matrix(3, 4), torch.arange(5)
    _assert_same(lambda x: torch.bucketize(0.5, x[0].sort().values), x)
    _assert_same(lambda x: x.clone().__ilshift__(2), whole)
    _assert_same(lambda x, y: x.clone().__irshift__(y), whole * 9, whole)
    _assert_same(lambda x: torch.ops.aten._upsample_lanczos2d_aa(x, [5, 7], False), _matrix(1, 2, 9, 8))


@pytest.mark.parametrize("shape", [(5, 5), (6, 5), (2, 1, 6, 5)], ids=str)
def test_products_of_complex_reflectors_and_their_gradients(shape: tuple[int, ...]) -> None:
    """In complex128: in complex64 the CPU's own gradients have two right digits of small elements."""
    reflectors = torch.complex(_matrix(*shape), _matrix(*shape) + 1).to(torch.complex128)
    factors = reflectors[..., 0, :].conj() / 3
    found = []
    for device in ("cpu", "xla"):
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in (reflectors, factors)]
        result = torch.linalg.householder_product(*leaves)
        gradients = torch.autograd.grad((result * result.detach().conj()).sum().abs(), leaves)
        found.append([tensor.detach().cpu() for tensor in (result, *gradients)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
