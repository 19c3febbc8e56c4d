"""Perplexity over tokens."""

import pytest
import torch
import torch.nn.functional as F

from tests.metrics.checks import split, value
from xlatrainer.metrics.perplexity import Perplexity

GENERATOR = torch.Generator().manual_seed(6)
SCORES = torch.randn(12, 5, 9, generator=GENERATOR)  # (N, L, C)
TOKENS = torch.randint(0, 9, (12, 5), generator=GENERATOR)
TOKENS[3:, 4] = -100


def expected(scores: torch.Tensor, tokens: torch.Tensor) -> float:
    return F.cross_entropy(scores.reshape(-1, 9).double(), tokens.reshape(-1)).exp().item()


def test_classes_last() -> None:
    assert value(Perplexity(shift=False), *split(SCORES, TOKENS)) == pytest.approx(expected(SCORES, TOKENS), abs=1e-4)
    causal = expected(SCORES[:, :-1], TOKENS[:, 1:])
    assert value(Perplexity(shift=True), *split(SCORES, TOKENS)) == pytest.approx(causal, abs=1e-4)


def test_classes_as_cross_entropy_takes_them() -> None:
    wanted = pytest.approx(expected(SCORES, TOKENS), abs=1e-4)
    assert value(Perplexity(), *split(SCORES.transpose(1, 2), TOKENS)) == wanted
    assert value(Perplexity(), *split(SCORES.reshape(-1, 9), TOKENS.reshape(-1))) == wanted


def test_weights_of_tokens() -> None:
    weight = torch.rand(12, 5, generator=GENERATOR)
    for shift, first in ((True, 1), (False, 0)):
        scores = SCORES[:, : 5 - first].transpose(1, 2)
        losses = F.cross_entropy(scores, TOKENS[:, first:], reduction="none")
        counted = weight[:, first:] * (TOKENS[:, first:] != -100)
        wanted = ((losses * counted).sum() / counted.sum()).exp().item()
        metric = Perplexity(shift=shift).set_weighted()
        assert value(metric, *split(SCORES, TOKENS, weight)) == pytest.approx(wanted, abs=1e-4)


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Perplexity\(shift=True\) for a causal model"):
        Perplexity().update(SCORES, TOKENS)
    with pytest.raises(ValueError, match=r"predictions of shape \(12, 9, 9\)"):
        Perplexity().update(torch.zeros(12, 9, 9), torch.zeros(12, 9).long())
