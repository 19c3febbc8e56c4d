"""Attention modules without gradients: torch calls kernels of its own for them."""

import copy
from typing import Any

import pytest
import torch

from xlatrainer.backend import counters

BATCH = torch.linspace(-1, 1, 2 * 5 * 8).sin().view(2, 5, 8)
PADDING = torch.tensor([[False, False, False, True, True], [False] * 5])
CAUSAL = torch.ones(5, 5).triu(1).bool()


def _fallbacks() -> list[str]:
    return [name for name in counters.snapshot() if name.startswith("aten::")]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_transformer_encoder(masks: str, norm_first: bool) -> None:
    """What stands at padded places is nobody's business: torch has zeros there where it makes nested tensors."""
    activation = "gelu" if norm_first else "relu"
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, activation=activation)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    given: dict[str, Any] = {"src_key_padding_mask": PADDING} if masks in ("padding", "both") else {}
    given |= {"mask": CAUSAL} if masks in ("causal", "both") else {}
    counters.reset()
    with torch.no_grad():
        expected = encoder(BATCH, **given)
        actual = copy.deepcopy(encoder).to("xla")(BATCH.to("xla"), **{name: x.to("xla") for name, x in given.items()})
    assert not _fallbacks()
    real = ~PADDING if masks in ("padding", "both") else torch.ones(2, 5, dtype=torch.bool)
    torch.testing.assert_close(actual.cpu()[real], expected[real])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"key_padding_mask": PADDING},
        {"attn_mask": CAUSAL},
        {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    ],
    ids=lambda options: " ".join(options),
)
def test_multi_head_attention(options: dict[str, Any]) -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    moved = {name: x.to("xla") if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    counters.reset()
    with torch.no_grad():
        expected, weights = attention(BATCH, BATCH, BATCH, **options)
        on_xla = BATCH.to("xla")
        actual, actual_weights = copy.deepcopy(attention).to("xla")(on_xla, on_xla, on_xla, **moved)
    assert not _fallbacks()
    torch.testing.assert_close(actual.cpu(), expected)
    assert (weights is None) == (actual_weights is None)
    if weights is not None:
        torch.testing.assert_close(actual_weights.cpu(), weights)


def test_nested_tensors_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="no nested tensors"):
        torch._nested_tensor_from_mask(BATCH.to("xla"), ~PADDING.to("xla"))
