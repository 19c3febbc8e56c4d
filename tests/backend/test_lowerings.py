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
# (batch norms without training) have another shape on the CPU than torch's own shape inference says.
_FIRST_RESULT_ONLY = """
    sort topk kthvalue msort mode median nanmedian native_batch_norm _native_batch_norm_legit
    """
FIRST_RESULT_ONLY = frozenset(_FIRST_RESULT_ONLY.split())

# rtol, atol and why the tolerance of the dtype is too strict.
_POLE = (2e-5, 2e-3, "gradients beside a pole, where the input's last bit counts")
_SQUARINGS = (5e-5, 1e-3, "another number of squarings")
LOOSE = {
    "grid_sampler_3d": (2e-5, 1e-4, "sums of many terms in another order"),
    "addbmm": (1e-5, 2e-5, "one sum over batch and row instead of a sum of products"),
    "asin": _POLE,
    "atanh": _POLE,
    "erfinv": _POLE,
    "linalg.matrix_exp": _SQUARINGS,
    "logcumsumexp": (2e-3, 4e-3, "a difference of large numbers: torch's own gradient is as far from float64's"),
    "matrix_exp": _SQUARINGS,
    "nn.functional.conv_transpose3d": (1e-5, 5e-5, "sums of many terms in another order"),
    "nn.functional.ctc_loss": (1e-3, 1e-4, "a difference of large logarithms: torch's own is as far from float64's"),
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


def _graded(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The result of a function, and the gradients of the inputs that are floats."""
    inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    result = function(*inputs)
    return [result, *torch.autograd.grad((result * result).sum(), [x for x in inputs if x.requires_grad])]


@pytest.mark.parametrize("lengths", ["on the device", "numbers", "targets in a row"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_loss(lengths: str, zero_infinity: bool) -> None:
    """With an alignment that is impossible, a sequence without labels, and one without anything."""
    targets = torch.randint(1, 6, (4, 7))
    sizes, counts = torch.tensor([20, 15, 3, 0]), torch.tensor([7, 0, 6, 0])
    if lengths == "targets in a row":
        targets = torch.cat([row[:count] for row, count in zip(targets, counts, strict=True)])

    def loss(logits: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, counts: torch.Tensor) -> Any:
        given = (sizes.tolist(), counts.tolist()) if lengths == "numbers" else (sizes, counts)
        ctc_loss = torch.nn.functional.ctc_loss
        options = {"reduction": "none", "zero_infinity": zero_infinity}
        return _graded(lambda x: ctc_loss(x.log_softmax(2), targets, *given, **options), logits)

    actual, expected = _on_both(loss, torch.randn(20, 4, 6), targets, sizes, counts)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3, equal_nan=True)


def test_ctc_loss_compiles_once_for_all_lengths() -> None:
    logits, targets = torch.randn(9, 2, 5).to("xla"), torch.randint(1, 5, (2, 3)).to("xla")
    losses = []
    for sizes, counts in (([9, 8], [3, 2]), ([7, 9], [1, 3]), ([5, 6], [2, 2])):
        loss = torch.nn.functional.ctc_loss(logits, targets, torch.tensor(sizes), torch.tensor(counts))
        losses.append(loss.item())
        if len(losses) == 1:
            counters.reset()
    assert counters.value("UncachedCompile") == 0
    assert len(set(losses)) == 3


@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample(mode: str, padding_mode: str) -> None:
    """Places inside, outside and exactly on the border, where torch's gradient is 0."""
    grid = torch.rand(2, 6, 7, 2) * 4 - 2
    grid[0, 0, :3] = torch.tensor([[-1.0, 1.0], [1.0, -1.0], [0.0, 0.0]])
    for align_corners in (False, True):
        options = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}

        def sample(image: torch.Tensor, grid: torch.Tensor, options: Any = options) -> Any:
            return _graded(lambda *inputs: torch.nn.functional.grid_sample(*inputs, **options), image, grid)

        actual, expected = _on_both(sample, torch.randn(2, 3, 5, 4), grid)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # sums in another order


@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str, include_last_offset: bool) -> None:
    """Bags that are empty, or hold padding only, give 0 and no gradient."""
    tokens, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 1, 1]), torch.tensor([0, 0, 4, 5, 9, 10])

    def bags(table: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor) -> Any:
        options = {"mode": mode, "padding_idx": 4, "include_last_offset": include_last_offset}
        embedding_bag = torch.nn.functional.embedding_bag
        if mode == "sum":
            weighted = {"per_sample_weights": weights}
            return _graded(
                lambda x, w: embedding_bag(tokens, x, offsets, **options, per_sample_weights=w), table, weights
            ) + [embedding_bag(tokens, table, offsets, **options, **weighted)]
        return _graded(lambda x: embedding_bag(tokens, x, offsets, **options), table)

    actual, expected = _on_both(bags, torch.randn(10, 4), torch.rand(10), tokens, offsets)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["_native_batch_norm_legit", "_batch_norm_with_update"])
def test_what_gives_results_and_writes_arguments(name: str) -> None:
    def normalize(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor]:
        mean, var = mean.clone(), var.clone()
        options = (True, 0.1, 1e-5) if name == "_native_batch_norm_legit" else (0.1, 1e-5)
        results = getattr(torch.ops.aten, name)(x, None, None, mean, var, *options)
        return [*results[:3], mean, var]

    actual, expected = _on_both(normalize, torch.randn(4, 3, 5), torch.zeros(3), torch.ones(3))
    torch.testing.assert_close(actual, expected)


def test_factories_write_their_out_argument() -> None:
    def fill(x: torch.Tensor) -> list[torch.Tensor]:
        floats, whole = torch.empty(0, device=x.device), torch.empty(0, device=x.device, dtype=torch.int64)
        return [torch.arange(5, out=floats) * 1, torch.arange(2, 9, 3, out=whole) * 1, torch.eye(2, 3, out=x) * 1]

    actual, expected = _on_both(fill, torch.zeros(2, 3))
    torch.testing.assert_close(actual, expected)


def test_leaky_noise_is_drawn_between_its_bounds() -> None:
    x = torch.randn(1000).to("xla").requires_grad_()
    y = torch.nn.functional.rrelu(x, training=True)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope * x, y)
    negative = slope[x < 0].cpu()
    assert 0.125 <= negative.min() < 0.15
    assert 0.31 < negative.max() <= 1 / 3 + 1e-6
    assert torch.equal(slope[x > 0].cpu(), torch.ones(int((x > 0).sum())))


@pytest.mark.parametrize("rank", [2, 3])
def test_fractional_max_pool(rank: int) -> None:
    pool = getattr(torch.nn.functional, f"fractional_max_pool{rank}d")

    def pooled(x: torch.Tensor, samples: torch.Tensor) -> list[torch.Tensor]:
        shape = (4, 5, 3)[:rank]
        places = pool(x, 2, output_size=shape, _random_samples=samples, return_indices=True)[1]
        return [*_graded(lambda x: pool(x, 2, output_size=shape, _random_samples=samples.detach()), x), places]

    actual, expected = _on_both(pooled, torch.randn(2, 3, 9, 8, 7)[(..., 0)[: 4 - rank] or ...], torch.rand(2, 3, rank))
    torch.testing.assert_close(actual, expected)


def test_fake_quantization() -> None:
    def quantize(x: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> list[torch.Tensor]:
        by_channel = torch.fake_quantize_per_channel_affine(x, scales, zeros, 1, -8, 7)
        return [by_channel, *_graded(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7), x)]

    actual, expected = _on_both(quantize, torch.randn(3, 4), torch.rand(4) + 0.1, torch.tensor([0, 1, -2, 3]).int())
    torch.testing.assert_close(actual, expected)


def test_embedding_rows_are_shortened_in_place() -> None:
    def look_up(table: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
        table = table.clone()
        return [torch.nn.functional.embedding(tokens, table, max_norm=1.0), table]

    actual, expected = _on_both(look_up, torch.randn(6, 4), torch.tensor([1, 3, 3]))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN", "weight_norm"])
def test_recurrent_layers_and_weight_norm(layer: str, bias: bool) -> None:
    if layer == "weight_norm":
        model: Any = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3, bias=bias))
    else:
        model = getattr(torch.nn, layer)(4, 5, 2, bias=bias, bidirectional=True)
    weights = dict(model.named_parameters())

    def run(x: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        def call(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
            result = torch.func.functional_call(model, dict(zip(weights, values, strict=True)), (x,))
            return torch.cat([part.flatten() for part in _tensors(result)])

        return _graded(call, x, *values)

    actual, expected = _on_both(run, torch.randn(6, 2, 4), *weights.values())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)  # sums over time in another order


def test_batch_norm_whose_input_wants_no_gradient() -> None:
    def gradient(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        weight = weight.clone().requires_grad_()
        result = torch.nn.functional.batch_norm(x, None, None, weight, training=True)
        return torch.autograd.grad((result**3).sum(), weight)[0]

    actual, expected = _on_both(gradient, torch.randn(4, 3, 5), torch.rand(3))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
