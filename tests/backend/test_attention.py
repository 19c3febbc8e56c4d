"""Scaled dot-product attention against CPU torch: values, gradients, masks, and long sequences in blocks."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import xlatrainer as xla
from xlatrainer.backend.lowerings import attention
from xlatrainer.backend.recorder import state

_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def _inputs(rows, columns, dtype=torch.float32, batch=2, heads=3, width=8):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    shapes = [(batch, heads, rows, width), *[(batch, heads, columns, width)] * 2, (batch, heads, rows, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _run(device, tensors, mask=None, **options):
    """The result and the gradients of query, key and value."""
    query, key, value = (tensor.to(device, copy=True).requires_grad_() for tensor in tensors[:3])
    mask = mask if mask is None else mask.to(device)
    out = scaled_dot_product_attention(query, key, value, mask, **options)
    out.backward(tensors[3].to(device))
    return [tensor.detach().cpu() for tensor in (out, query.grad, key.grad, value.grad)]


def _compare(tensors, mask=None, **options):
    expected = _run("cpu", tensors, mask, **options)
    tolerance = _TOLERANCE[tensors[0].dtype]
    for ours, theirs in zip(_run("xla", tensors, mask, **options), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def _masks(rows, columns):
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(rows, columns, generator=generator) > 0.4
    seen[1] = False  # a query that sees nothing
    added = torch.randn(2, 1, rows, columns, generator=generator)
    added[:, :, 2] = -torch.inf
    return {"none": None, "bool": seen, "float": added, "keys": seen[None, None, 3:4], "heads": added[:1, :, :, :1]}


@pytest.fixture
def in_blocks(monkeypatch):
    """Blocks of 16 queries even for short sequences."""
    monkeypatch.setattr(attention, "_LONG", 1)
    monkeypatch.setattr(attention, "_AT_ONCE", 1)


@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(37, 37), (5, 23), (40, 7)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_equals_cpu(dtype, rows, columns, is_causal):
    _compare(_inputs(rows, columns, dtype), is_causal=is_causal, scale=0.3)


@pytest.mark.parametrize("kind", ["none", "bool", "float", "keys", "heads"])
def test_masks_equal_cpu(kind):
    _compare(_inputs(6, 9), _masks(6, 9)[kind])


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(37, 38), (11, 24), (41, 7)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_equal_cpu(dtype, rows, columns, is_causal):
    """Other shapes than above: a program that was compiled for these would be found again."""
    _compare(_inputs(rows, columns, dtype), is_causal=is_causal)


@pytest.fixture
def in_spans(monkeypatch):
    """Four spans of queries even for short sequences."""
    monkeypatch.setattr(attention, "_SHORTEST_SPAN", 1)


@pytest.mark.usefixtures("in_spans")
@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize(("rows", "columns"), [(38, 38), (11, 25), (42, 9), (3, 3)])
def test_spans_of_causal_attention_equal_cpu(dtype, rows, columns):
    _compare(_inputs(rows, columns, dtype), is_causal=True, scale=0.4)


@pytest.mark.usefixtures("in_spans", "in_blocks")
@pytest.mark.parametrize("dtype", _TOLERANCE)
def test_spans_of_more_than_one_block_equal_cpu(dtype):
    _compare(_inputs(131, 140, dtype), is_causal=True)


def _products(is_causal):
    """Multiplications and additions of attention with its gradient, 256 tokens."""
    tensors = [tensor.to("xla") for tensor in _inputs(256, 256, batch=1, heads=1)]
    query, key, value = (tensor.requires_grad_() for tensor in tensors[:3])
    xla.sync()
    scaled_dot_product_attention(query, key, value, is_causal=is_causal).backward(tensors[3])
    root = state.trace.node
    xla.sync(wait=True)
    (program,) = root.programs
    return program.lowered().cost_analysis()["flops"]


def test_causal_attention_leaves_out_products_with_keys_that_no_query_of_a_span_sees():
    assert _products(is_causal=True) < 0.7 * _products(is_causal=False)


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("kind", ["none", "bool", "float", "keys", "heads"])
def test_masks_in_blocks_equal_cpu(kind):
    _compare(_inputs(36, 25), _masks(36, 25)[kind])


def _largest_temporaries(program):
    return program.memory_sizes()["temporaries"]


def test_long_sequences_do_not_hold_the_whole_matrix():
    """4096 tokens and 8 heads: the matrix alone would be 512 MiB, for the forward pass and again for the gradient."""
    tensors = _inputs(4096, 4096, batch=1, heads=8, width=16)
    query, key, value = (tensor.to("xla").requires_grad_() for tensor in tensors[:3])
    xla.sync()
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    out.backward(tensors[3].to("xla"))
    root = state.trace.node
    xla.sync(wait=True)
    (program,) = root.programs
    assert _largest_temporaries(program) < 256 * 2**20
    row = slice(4000, 4002)
    scores = (tensors[0][:, :, row] @ tensors[1].mT) / 4
    scores.masked_fill_(torch.arange(4096) > torch.arange(4000, 4002)[:, None], -torch.inf)
    torch.testing.assert_close(out[:, :, row].detach().cpu(), scores.softmax(-1) @ tensors[2], atol=2e-5, rtol=2e-5)


def test_attention_is_one_operator_with_a_gradient_of_its_own():
    query = torch.randn(1, 2, 4, 8, device="xla", requires_grad=True)
    out = scaled_dot_product_attention(query, query, query)
    assert "Flash" in type(out.grad_fn).__name__


@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"enable_gqa": True}])
def test_what_flash_attention_cannot_do_is_composed(options):
    query = torch.randn(1, 4, 4, 8, device="xla", requires_grad=True)
    key = torch.randn(1, 2 if "enable_gqa" in options else 4, 4, 8, device="xla")
    out = scaled_dot_product_attention(query, key, key, **options)
    out.sum().backward()
    assert out.shape == query.shape
    assert torch.isfinite(query.grad.cpu()).all()


def test_a_mask_with_a_gradient_gets_one():
    tensors = _inputs(5, 7)
    grads = []
    for device in ("cpu", "xla"):
        mask = torch.zeros(5, 7, device=device, requires_grad=True)
        out = scaled_dot_product_attention(*(tensor.to(device) for tensor in tensors[:3]), mask)
        grads.append(torch.autograd.grad((out * tensors[3].to(device)).sum(), mask)[0].cpu())
    torch.testing.assert_close(grads[1], grads[0], atol=1e-5, rtol=1e-5)


def test_mask_and_causal_together_are_refused_as_on_the_cpu():
    query = torch.randn(1, 2, 4, 8)
    messages = []
    for device in ("cpu", "xla"):
        on = query.to(device)
        with pytest.raises(RuntimeError) as caught:
            scaled_dot_product_attention(on, on, on, torch.zeros(4, 4, device=device), is_causal=True)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
