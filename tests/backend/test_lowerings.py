"""Every operator of torch's own operator database, on `xla` against the CPU: values, dtypes, gradients, in-place forms.

The operators of everyday models (`CORE`) run always, the whole database is marked slow. The number of operators that
are right is the number of passed `test_operator` cases of

    pytest -m slow tests/backend/test_lowerings.py

which in one process (without `-n`) also prints, at its end, how many of them ran without help of the CPU. The tables
below say which operators are left out, compared loosely or known to be wrong, each with the reason.
"""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from xlatrainer.backend import counters
from xlatrainer.backend.lowerings.registry import registered
from xlatrainer.backend.schema import signature

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's test helpers speak of optional packages that we do not use
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# Samples come with warnings of torch's own, and an operator without a lowering warns that it runs on the CPU.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = 4  # of each operator and dtype
DTYPES = (torch.float32, torch.int64, torch.bool)

_CORE = """
    __getitem__ abs add addbmm addcdiv addcmul addmm addmv all amax amin any arange argmax argmin baddbmm bitwise_and
    bitwise_not bmm bool cat ceil chunk clamp clamp_max clamp_min clone constant_pad_nd contiguous copysign cos cumsum
    diagonal div dot einsum eq erf exp expand expm1 eye fill flatten flip float floor floor_divide full gather ge gt
    half index_add index_copy index_fill index_put index_select int isfinite isinf isnan le lerp linalg.vector_norm
    linspace log log1p log_softmax logical_and logical_not logical_or logsumexp lt masked_fill masked_scatter matmul
    max maximum mean min minimum mm movedim mul mv ne neg new_full new_ones new_zeros nn.functional.batch_norm
    nn.functional.adaptive_avg_pool2d nn.functional.avg_pool2d nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.conv1d nn.functional.conv2d
    nn.functional.conv_transpose2d nn.functional.cosine_similarity nn.functional.cross_entropy nn.functional.elu
    nn.functional.embedding nn.functional.gelu nn.functional.glu nn.functional.group_norm nn.functional.hardswish
    nn.functional.huber_loss nn.functional.kl_div nn.functional.l1_loss nn.functional.layer_norm
    nn.functional.leaky_relu nn.functional.linear nn.functional.logsigmoid nn.functional.max_pool2d
    nn.functional.mse_loss nn.functional.nll_loss nn.functional.normalize nn.functional.one_hot nn.functional.pad
    nn.functional.pixel_shuffle nn.functional.relu nn.functional.rms_norm nn.functional.scaled_dot_product_attention
    nn.functional.silu nn.functional.smooth_l1_loss nn.functional.softplus nn.functional.unfold norm ones_like outer
    permute pow prod reciprocal remainder repeat reshape roll rsqrt scatter scatter_add scatter_reduce select
    select_scatter sigmoid sign sin slice slice_scatter softmax sort split sqrt squeeze stack std sub sum t take tanh
    tile topk trace transpose tril triu true_divide unbind unfold unsqueeze var var_mean view where zeros_like
    """
CORE = frozenset(_CORE.split())

_RANDOM = """
    bernoulli cauchy exponential geometric log_normal multinomial normal rand_like randint randint_like randn randn_like
    randperm uniform nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
    nn.functional.feature_alpha_dropout nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
    nn.functional.multi_head_attention_forward nn.functional.rrelu pca_lowrank svd_lowrank
    """
_UNDEFINED = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided"
_SPARSE = "sparse.sampled_addmm sparse.mm.reduce to_sparse"
LEFT_OUT = {
    **dict.fromkeys(_RANDOM.split(), "draws random numbers, of which the device has its own: see test_random.py"),
    **dict.fromkeys(_UNDEFINED.split(), "what it holds is undefined"),
    **dict.fromkeys(_SPARSE.split(), "the device has no sparse tensors"),
    "argsort": "which of equal elements comes first is free; test_order_of_equal_elements",
    "as_strided.partial_views": "its samples depend on the storage behind a view, which a copy to a device drops",
    "chalf": "XLA has no complex32",
    **{op.name: "for CUDA only" for op in op_db if op.name.startswith("jiterator")},
    "linalg.eig": "eigenvectors are unique up to a factor",
    "linalg.eigh": "eigenvectors are unique up to a sign; test_factorisations_give_the_matrix_back",
    "tensor_split": "wants its indices on the CPU, where the test does not leave them",
    "to": "pins memory, which is for the CPU's tensors",
}

# Of these only the first result is compared: the others say where equal elements are, of which any may be named, or
# (native_batch_norm without training) have another shape on the CPU than torch's own shape inference says.
FIRST_RESULT_ONLY = frozenset({"sort", "topk", "kthvalue", "msort", "mode", "median", "nanmedian", "native_batch_norm"})

# rtol, atol and why the tolerance of the dtype is too strict.
_POLE = (2e-5, 2e-3, "gradients beside a pole, where the input's last bit counts")
_SQUARINGS = (5e-5, 1e-3, "another number of squarings")
LOOSE = {
    "addbmm": (1e-5, 2e-5, "one sum over batch and row instead of a sum of products"),
    "asin": _POLE,
    "atanh": _POLE,
    "erfinv": _POLE,
    "linalg.matrix_exp": _SQUARINGS,
    "logcumsumexp": (2e-3, 4e-3, "a difference of large numbers: torch's own gradient is as far from float64's"),
    "matrix_exp": _SQUARINGS,
    "nn.functional.conv_transpose3d": (1e-5, 5e-5, "sums of many terms in another order"),
    "nn.functional.layer_norm": (1e-5, 2e-4, "gradient of a norm over one element: 0 times 1 / sqrt(eps)"),
}

KNOWN_WRONG: dict[str, str] = {}


def _full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _reason(table: dict[str, Any], op: OpInfo) -> Any:
    return table.get(_full_name(op)) or table.get(op.name)


OPERATORS = [op for op in op_db if not _reason(LEFT_OUT, op)]
CASES = [(op, dtype) for op in OPERATORS if op.name in CORE for dtype in DTYPES if dtype in op.dtypes]


def _case_name(part: OpInfo | torch.dtype) -> str:
    return _full_name(part) if isinstance(part, OpInfo) else str(part).removeprefix("torch.")


# running one sample


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _to_xla(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("xla")
    return leaf.detach().to("xla").requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _to_cpu(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


def _gradients(results: Any, inputs: Any) -> tuple[torch.Tensor | None, ...]:
    """Gradients of all inputs that want one, for the same random gradients of the results on every device."""
    wanted = [tensor for tensor in _tensors(inputs) if tensor.requires_grad]
    given = [tensor for tensor in _tensors(results) if tensor.requires_grad]
    if not wanted or not given:
        return ()
    generator = torch.Generator().manual_seed(0)
    heads = [torch.rand(tensor.shape, dtype=tensor.dtype, generator=generator).to(tensor.device) for tensor in given]
    return torch.autograd.grad(given, wanted, heads, allow_unused=True)


def _samples(op: OpInfo, dtype: torch.dtype) -> Iterator[SampleInput]:
    """The first samples that draw no random numbers."""
    wants_gradient = op.supports_autograd and dtype.is_floating_point
    found = 0
    for sample in op.sample_inputs("cpu", dtype, requires_grad=wants_gradient):
        if sample.kwargs.get("dropout_p"):
            continue
        yield sample
        found += 1
        if found == SAMPLES:
            return


def _compare(op: OpInfo, actual: Any, expected: Any) -> None:
    rtol, atol, _ = _reason(LOOSE, op) or (None, None, "")
    if op.name in FIRST_RESULT_ONLY and isinstance(expected, tuple):
        actual, expected = actual[0], expected[0]
    torch.testing.assert_close(_to_cpu(actual), _to_cpu(expected), rtol=rtol, atol=atol, equal_nan=True)


def _check(op: OpInfo, dtype: torch.dtype) -> None:
    """Run the samples on both devices; a sample that the CPU refuses is not a sample."""
    for sample in _samples(op, dtype):
        inputs = ((sample.input, *sample.args), sample.kwargs)
        if op.is_factory_function or "device" in sample.kwargs:
            sample.kwargs["device"] = torch.device("cpu")
        try:
            expected = op(*inputs[0], **inputs[1])
            expected_gradients = _gradients(expected, inputs)
        except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError):
            continue
        on_xla = tree_map(_to_xla, inputs)
        actual = op(*on_xla[0], **on_xla[1])
        assert all(tensor.device.type == "xla" for tensor in _tensors(actual))
        _compare(op, actual, expected)
        for mine, reference in zip(_gradients(actual, on_xla), expected_gradients, strict=True):
            assert (mine is None) == (reference is None)
            if reference is not None:
                _compare(op, mine, reference)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=_case_name)
def test_everyday_operator(op: OpInfo, dtype: torch.dtype) -> None:
    _check(op, dtype)


@dataclass
class _Tally:
    """What the whole database came to, in this process."""

    right: int = 0
    tried: int = 0
    helped: dict[str, list[str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[_Tally]:
    counted = _Tally()
    yield counted
    alone = counted.right - len(counted.helped)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\noperators right: {counted.right} of {counted.tried}, without the CPU's help: {alone}")
        for name, helpers in counted.helped.items():
            print(f"  {name}: {', '.join(helpers)}")


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATORS, ids=_full_name)
def test_operator(op: OpInfo, tally: _Tally, request: pytest.FixtureRequest) -> None:
    if reason := _reason(KNOWN_WRONG, op):
        request.applymarker(pytest.mark.xfail(reason=reason))
    counters.reset()
    tally.tried += 1
    for dtype in DTYPES:
        if dtype in op.dtypes:
            _check(op, dtype)
    tally.right += 1
    if helpers := [name for name in counters.snapshot() if name.startswith("aten::")]:
        tally.helped[_full_name(op)] = helpers


IN_PLACE = [op for op in OPERATORS if op.inplace_variant and op.name in CORE]


@pytest.mark.parametrize("op", IN_PLACE, ids=_full_name)
def test_in_place(op: OpInfo) -> None:
    ran = 0
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
        if sample.broadcasts_input or ran == SAMPLES:
            continue
        inputs = ((sample.input, *sample.args), sample.kwargs)
        on_xla = tree_map(_to_xla, inputs)
        try:
            op.inplace_variant(*inputs[0], **inputs[1])
        except RuntimeError:  # the result has a dtype that the input cannot hold
            continue
        result = op.inplace_variant(*on_xla[0], **on_xla[1])
        assert result is on_xla[0][0]
        _compare(op, result, sample.input)
        ran += 1


# what the database does not say


def test_lowerings_are_of_functional_operators() -> None:
    for name, lowering in registered().items():
        assert signature(lowering.overload).functional, name
        aliases = [argument.name for argument in lowering.overload._schema.arguments if argument.alias_info is not None]
        assert not aliases, f"{name}: torch makes views itself"


def test_no_lowering_hides_autograd() -> None:
    """torch differentiates what an operator is made of; a kernel of ours is only right where it has a formula too."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    composites = [name for name in registered() if has_kernel(name, "CompositeImplicitAutograd")]
    assert not [name for name in composites if not has_kernel(name, "Autograd")]


def test_lowerings_take_the_arguments_of_the_schema() -> None:
    for lowering in registered().values():
        arguments = lowering.overload._schema.arguments
        positional = [argument.name for argument in arguments if not argument.kwarg_only]
        named = {argument.name: None for argument in arguments if argument.kwarg_only}
        named |= {"key": None} if lowering.random else {}
        named |= {"out_specs": None} if lowering.takes_specs else {}
        inspect.signature(lowering.function).bind(*positional, **named)


def _on_both(function: Any, *inputs: Any) -> tuple[Any, Any]:
    """Results of a function of tensors on the CPU and on `xla`, and that the CPU did not help with the latter."""
    expected = function(*inputs)
    counters.reset()
    actual = function(*tree_map(_to_xla, inputs))
    helpers = [name for name in counters.snapshot() if name.startswith("aten::")]
    assert not helpers
    return _to_cpu(actual), _to_cpu(expected)


def test_order_of_equal_elements() -> None:
    values = torch.tensor([[2.0, 1.0, 2.0, float("nan"), 1.0], [0.0, -0.0, 3.0, 3.0, 3.0]])
    for descending in (False, True):
        actual, expected = _on_both(lambda x, d=descending: torch.sort(x, stable=True, descending=d), values)
        torch.testing.assert_close(actual, expected, equal_nan=True)
    truth = torch.rand(50) > 0.5
    actual, expected = _on_both(lambda x: torch.sort(x, stable=True), truth)
    torch.testing.assert_close(actual, expected)


def test_topk_points_at_its_values() -> None:
    scores = torch.randn(5, 40)
    for largest in (True, False):
        values, indices = torch.topk(scores.to("xla"), 7, largest=largest)
        torch.testing.assert_close(values.cpu(), torch.topk(scores, 7, largest=largest).values)
        torch.testing.assert_close(scores.gather(1, indices.cpu()), values.cpu())


def test_a_mask_can_be_filled_without_the_cpu() -> None:
    def fill(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[x > 0.5] = 0
        x[x[:, 0] < 0] = value
        return x

    actual, expected = _on_both(fill, torch.randn(6, 3), torch.tensor(7.0))
    torch.testing.assert_close(actual, expected)


def test_a_mask_that_selects_runs_on_the_cpu() -> None:
    x = torch.randn(6, 3)
    counters.reset()
    selected = x.to("xla")[x.to("xla") > 0]
    assert counters.value("aten::index") == 1
    torch.testing.assert_close(selected.cpu(), x[x > 0])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3, 4), (5,)], ids=str)
def test_cross_entropy(reduction: str, shape: tuple[int, ...]) -> None:
    targets = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if targets.dim():
        targets.view(-1)[::3] = -100

    def loss(logits: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        logits = logits.clone().requires_grad_()
        options = {"reduction": reduction, "label_smoothing": 0.1}
        weighted = torch.nn.functional.cross_entropy(logits, targets, weight, **options)
        plain = torch.nn.functional.cross_entropy(logits, targets, reduction=reduction)
        return [weighted, plain, *torch.autograd.grad((weighted + plain).sum(), logits)]

    actual, expected = _on_both(loss, torch.randn(shape), targets, torch.rand(5))
    torch.testing.assert_close(actual, expected)


def test_cross_entropy_of_nothing_is_nan() -> None:
    ignored = torch.full((4,), -100)
    actual, expected = _on_both(torch.nn.functional.cross_entropy, torch.randn(4, 3), ignored)
    torch.testing.assert_close(actual, expected, equal_nan=True)


def test_embedding_padding_gets_no_gradient() -> None:
    def gradient(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        weight = weight.clone().requires_grad_()
        found = torch.nn.functional.embedding(tokens, weight, padding_idx=1, scale_grad_by_freq=True)
        return torch.autograd.grad((found * found).sum(), weight)[0]

    actual, expected = _on_both(gradient, torch.randn(7, 4), torch.tensor([[1, 2, 2], [6, 1, 0]]))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    ones = torch.ones(4096, 2, dtype=dtype)

    def sums(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.sum(0),
            x.mean(0),
            x.T @ x / 64,
            x.var(0),
            x.norm(),
            x.cumsum(0)[-1] * 0 + x.sum(),
            x.softmax(0).sum(0),
        ]

    actual, expected = _on_both(sums, ones)
    torch.testing.assert_close(actual, expected)


def test_factorisations_give_the_matrix_back() -> None:
    matrix = torch.randn(3, 5, 5)
    symmetric = (matrix + matrix.mT).to("xla")
    values, vectors = torch.linalg.eigh(symmetric)
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, symmetric, rtol=1e-4, atol=1e-5)
    left, middle, right = torch.linalg.svd(matrix.to("xla"))
    torch.testing.assert_close((left * middle[:, None]) @ right, matrix.to("xla"), rtol=1e-4, atol=1e-5)
    q, r = torch.linalg.qr(matrix.to("xla"))
    torch.testing.assert_close(q @ r, matrix.to("xla"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradient_of_determinant_for_every_layout(transposed: bool) -> None:
    matrix = torch.randn(4, 4)
    expected = matrix.clone().requires_grad_()
    actual = matrix.to("xla").requires_grad_()
    for leaf in (expected, actual):
        torch.linalg.det(leaf.mT if transposed else leaf).backward()
    torch.testing.assert_close(actual.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-5)
