"""Everyday operators in bfloat16 and float16: dtypes as torch's CPU has them, values as near to float32's as the CPU's.

Kernels of both sides compute in float32 and round once. XLA also leaves out roundings between operators that it fuses,
so a result need not be the CPU's to the last bit; it must not be further from what float32 gives by more than the
tolerance that torch's own test helpers have for the dtype.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from xlatrainer.backend import counters

DTYPES = [torch.bfloat16, torch.float16]
TOLERANCES = {torch.bfloat16: (1.6e-2, 1e-2), torch.float16: (2e-3, 2e-3)}  # rtol, atol

UNARY = """
    abs acos asin atan ceil cos cosh digamma erf erfc exp exp2 expm1 floor frac isinf isnan lgamma log log10 log1p log2
    logical_not neg reciprocal relu round rsqrt sigmoid sign sin sinc sinh sqrt square tan tanh trunc
    """
BINARY = """
    add atan2 copysign div eq fmax fmin fmod ge gt hypot le logaddexp lt maximum minimum mul ne pow remainder sub xlogy
    """
REDUCTIONS = "amax amin argmax argmin logsumexp max mean median min norm prod std sum var"
SCANS = "cummax cummin cumprod cumsum log_softmax logcumsumexp softmax"
ACTIVATIONS = """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus
    softshrink softsign tanhshrink
    """

Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def _cases() -> dict[str, Case]:
    """Functions of half tensors and the shapes of those."""
    vector, matrix, image = (30,), (6, 5), (2, 4, 8, 8)
    cases: dict[str, Case] = {}
    cases |= {name: (getattr(torch, name), (vector,)) for name in UNARY.split()}
    cases |= {name: (getattr(torch, name), (vector, vector)) for name in BINARY.split()}
    cases |= {name: (getattr(F, name), (matrix,)) for name in ACTIVATIONS.split()}
    for name in (REDUCTIONS + " " + SCANS).split():
        cases[f"{name} of a dim"] = (lambda x, name=name: getattr(torch, name)(x, dim=1), (matrix,))
    for name in ("max", "mean", "min", "norm", "std", "sum", "var"):
        cases[f"{name} of all"] = (getattr(torch, name), (matrix,))
    cases |= {
        "add with alpha": (lambda x, y: torch.add(x, y, alpha=0.3), (vector, vector)),
        "mul by a number": (lambda x: x * 0.1, (vector,)),
        "times float32": (lambda x: x * torch.ones(3, device=x.device), ((2, 3),)),
        "sum in float32": (lambda x: x.sum(dtype=torch.float32), (matrix,)),
        "to float": (lambda x: (x.float(), x.double(), x.long(), x.bool()), (matrix,)),
        "clamp": (lambda x: x.clamp(-0.3, 0.4), (matrix,)),
        "where": (lambda x, y: torch.where(x > y, x, 0.1), (matrix, matrix)),
        "lerp": (lambda x, y: torch.lerp(x, y, 0.3), (matrix, matrix)),
        "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.5), (matrix,) * 3),
        "addcdiv": (lambda x, y, z: torch.addcdiv(x, y, z.abs() + 1, value=0.5), (matrix,) * 3),
        "sort": (lambda x: torch.sort(x, dim=1, stable=True), (matrix,)),
        "topk": (lambda x: torch.topk(x, 3, dim=1).values, (matrix,)),
        "gather": (lambda x: x.gather(1, torch.zeros(6, 2, dtype=torch.long, device=x.device)), (matrix,)),
        "index_add": (
            lambda x, y: x.index_add(0, torch.tensor([0, 0, 2], device=x.device), y),
            (matrix, (3, 5)),
        ),
        "scatter_add": (
            lambda x, y: x.scatter_add(1, torch.zeros(6, 5, dtype=torch.long, device=x.device), y),
            (matrix, matrix),
        ),
        "cat": (lambda x, y: torch.cat([x, y]), (matrix, matrix)),
        "tril": (torch.tril, (matrix,)),
        "linspace": (lambda x: torch.linspace(0, 1, 11, dtype=x.dtype, device=x.device), (vector,)),
        "arange": (lambda x: torch.arange(0, 1, 0.1, dtype=x.dtype, device=x.device), (vector,)),
        "matmul": (torch.matmul, ((2, 6, 64), (64, 5))),
        "bmm": (torch.bmm, ((2, 6, 64), (2, 64, 5))),
        "addmm": (lambda x, y, z: torch.addmm(x, y, z, beta=0.5, alpha=0.25), ((5,), (6, 64), (64, 5))),
        "linear": (F.linear, ((3, 64), (7, 64), (7,))),
        "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), ((2, 3, 8), (2, 4, 8))),
        "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (image, (6, 4, 3, 3), (6,))),
        "conv1d": (F.conv1d, ((2, 4, 9), (6, 4, 3))),
        "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (image, (4, 6, 3, 3))),
        "max_pool2d": (lambda x: F.max_pool2d(x, 2), (image,)),
        "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (image,)),
        "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (image,)),
        "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (image,)),
        "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (image, (4,), (4,))),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (image, (8,), (8,))),
        "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (image, (4,), (4,))),
        "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), (image, (8,))),
        "attention": (F.scaled_dot_product_attention, ((2, 2, 6, 8),) * 3),
        "embedding": (lambda w: F.embedding(torch.tensor([[1, 2, 2], [0, 1, 4]], device=w.device), w), (matrix,)),
        "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 3, 4, 0], device=x.device)), (matrix,)),
        "mse_loss": (F.mse_loss, (matrix, matrix)),
        "l1_loss": (F.l1_loss, (matrix, matrix)),
        "huber_loss": (F.huber_loss, (matrix, matrix)),
        "bce_with_logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), (matrix, matrix)),
        "glu": (F.glu, ((6, 4),)),
        "pad": (lambda x: F.pad(x, (1, 2), value=0.3), (matrix,)),
        "cosine_similarity": (F.cosine_similarity, (matrix, matrix)),
        "normalize": (F.normalize, (matrix,)),
    }
    return cases


CASES = _cases()


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def _run(function: Callable[..., Any], inputs: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Results and gradients of the inputs, on the CPU again."""
    leaves = [x.to(device).requires_grad_() for x in inputs]
    results = _tensors(function(*leaves))
    wanted = [result for result in results if result.requires_grad]
    heads = [torch.linspace(0.5, 1, result.numel()).view(result.shape).to(device, result.dtype) for result in wanted]
    gradients = torch.autograd.grad(wanted, leaves, heads, allow_unused=True) if wanted else ()
    return [tensor.detach().cpu() for tensor in (*results, *gradients) if tensor is not None]


def _assert_as_near(mine: torch.Tensor, theirs: torch.Tensor, wide: torch.Tensor, rtol: float, atol: float) -> None:
    """Both are equal, or mine is as near to the wide result as theirs, but for the tolerance."""
    mine, theirs, wide = mine.double(), theirs.double(), wide.double()
    equal = (mine == theirs) | (mine.isnan() & theirs.isnan())
    near = (mine - wide).abs() <= (theirs - wide).abs() + atol + rtol * wide.abs()
    assert (equal | near).all(), f"{mine}\nhere, on the CPU\n{theirs}\nin float32\n{wide}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_operator(name: str, dtype: torch.dtype) -> None:
    function, shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(shape, generator=generator).mul(1.8).sub(0.9).to(dtype) for shape in shapes]
    expected = _run(function, inputs, "cpu")
    counters.reset()
    actual = _run(function, inputs, "xla")
    assert not [counter for counter in counters.snapshot() if counter.startswith("aten::")]
    exact = _run(function, [x.float() for x in inputs], "cpu")
    for mine, theirs, wide in zip(actual, expected, exact, strict=True):
        assert mine.dtype == theirs.dtype
        if mine.is_floating_point():
            _assert_as_near(mine, theirs, wide, *TOLERANCES[dtype])
        else:
            torch.testing.assert_close(mine, theirs)
