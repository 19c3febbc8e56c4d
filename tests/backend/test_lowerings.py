"""Operators where the database says too little: combinations, edges and what a lowering promises.

Every operator on the database's own samples: `test_opinfo.py`.
"""

import inspect
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.backend.opinfo_database import tensors
from tests.backend.opinfo_samples import to_cpu, to_xla
from xlatrainer.backend import counters
from xlatrainer.backend.lowerings.registry import registered
from xlatrainer.backend.schema import signature

# An operator without a lowering warns that it runs on the CPU, which some tests here want it to.
pytestmark = pytest.mark.filterwarnings("ignore")


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
    actual = function(*tree_map(to_xla, inputs))
    helpers = [name for name in counters.snapshot() if name.startswith("aten::")]
    assert not helpers
    return to_cpu(actual), to_cpu(expected)


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


def test_a_mask_that_selects_waits_for_one_number() -> None:
    x = torch.randn(6, 3)
    counters.reset()
    selected = x.to("xla")[x.to("xla") > 0]
    assert counters.value("sync::index") == 1
    assert counters.value("aten::index") == 0
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
            return torch.cat([part.flatten() for part in tensors(result)])

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
