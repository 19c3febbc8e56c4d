"""Models of `transformers` with small random configurations, trained with the loss that they return themselves."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import xlatrainer as xla
from tests.models.conftest import Compare
from tests.models.harness import SEED, TOLERANCE, Batch, Case, fit_on_both, tie

pytestmark = pytest.mark.models

BATCH, LENGTH, VOCAB, WIDTH = 4, 16, 100, 32
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 64}
BERT = {**SMALL, **TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**SMALL, **TEXT, "num_key_value_heads": 2, "use_cache": False}
VIT = {**SMALL, "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _tokens(length: int = LENGTH) -> torch.Tensor:
    """Token ids, (BATCH, length), without the ids that stand for padding and beginnings."""
    return torch.randint(3, VOCAB, (BATCH, length))


def _mask() -> torch.Tensor:
    """Ones, then zeros for padding behind texts of different lengths: (BATCH, LENGTH)."""
    lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 7, 5])
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def _text() -> Batch:
    """For a language model: labels are ids, -100 where padding is."""
    ids, mask = _tokens(), _mask()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _labelled_text() -> Batch:
    return {"input_ids": _tokens(), "attention_mask": _mask(), "labels": torch.randint(0, 2, (BATCH,))}


def _translation() -> Batch:
    return {"input_ids": _tokens(), "attention_mask": _mask(), "labels": _tokens(10)}


def _labelled_images() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 2, (BATCH,))}


def _speech() -> Batch:
    return {"input_features": torch.randn(BATCH, 16, 64), "labels": _tokens(10)}


def _captions() -> Batch:
    images = torch.randn(BATCH, 3, 32, 32)
    return {"input_ids": _tokens(), "attention_mask": _mask(), "pixel_values": images, "return_loss": True}


def _of(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A builder of the class `kind` from the configuration class `config`."""
    return lambda: getattr(hf, kind)(getattr(hf, config)(**settings))


def _clip() -> nn.Module:
    text = {**SMALL, **TEXT, "projection_dim": WIDTH, "eos_token_id": 2}
    vision = {**SMALL, "image_size": 32, "patch_size": 8, "projection_dim": WIDTH}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH))


GPT2 = {
    "vocab_size": VOCAB, "n_positions": 64, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "use_cache": False,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "use_cache": False,
}  # fmt: skip
WHISPER = {
    "vocab_size": VOCAB, "num_mel_bins": 16, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "use_cache": False,
}  # fmt: skip
MAMBA = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8, "use_cache": False}

EAGER = {"attn_implementation": "eager"}
CASES = [
    Case("BertForSequenceClassification", _of("BertForSequenceClassification", "BertConfig", **BERT), _labelled_text),
    Case("BertForMaskedLM", _of("BertForMaskedLM", "BertConfig", **BERT), _text),
    Case("BertForMaskedLM-eager", _of("BertForMaskedLM", "BertConfig", **BERT, **EAGER), _text),
    Case("GPT2LMHeadModel", _of("GPT2LMHeadModel", "GPT2Config", **GPT2), _text),
    Case("GPT2LMHeadModel-eager", _of("GPT2LMHeadModel", "GPT2Config", **GPT2, **EAGER), _text),
    Case("LlamaForCausalLM", _of("LlamaForCausalLM", "LlamaConfig", **LLAMA), _text),
    Case("LlamaForCausalLM-eager", _of("LlamaForCausalLM", "LlamaConfig", **LLAMA, **EAGER), _text),
    Case("T5ForConditionalGeneration", _of("T5ForConditionalGeneration", "T5Config", **T5), _translation),
    Case("ViTForImageClassification", _of("ViTForImageClassification", "ViTConfig", **VIT), _labelled_images),
    Case(
        "WhisperForConditionalGeneration", _of("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), _speech
    ),
    Case("MistralForCausalLM", _of("MistralForCausalLM", "MistralConfig", **LLAMA, sliding_window=8), _text),
    Case("MixtralForCausalLM", _of("MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4), _text),
    Case("CLIPModel", _clip, _captions),
    Case("MambaForCausalLM", _of("MambaForCausalLM", "MambaConfig", **MAMBA), _text),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_like_the_cpu(case: Case, compared: Compare) -> None:
    compared(case)


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
@pytest.mark.parametrize(("kind", "config", "settings"), [
    ("GPT2LMHeadModel", "GPT2Config", GPT2), ("LlamaForCausalLM", "LlamaConfig", LLAMA),
])  # fmt: skip
def test_text_is_generated(kind: str, config: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """The same tokens as on the CPU, behind texts of two lengths; no operator runs on the CPU."""
    torch.manual_seed(SEED)
    model = _of(kind, config, **{**settings, "use_cache": True})().eval()
    on_xla = tie(copy.deepcopy(model).to("xla"), model)
    ids = torch.randint(3, VOCAB, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **options}
    xla.counters.reset()
    given = on_xla.generate(ids.to("xla"), attention_mask=mask.to("xla"), **options)
    assert torch.equal(given.cpu(), model.generate(ids, attention_mask=mask, **options))
    assert not [counter for counter in xla.counters.snapshot() if counter.startswith("aten::")]


def test_with_the_trainer() -> None:
    """A batch is the dict of arguments that the model takes; the loss is the model's own."""
    model = hf.BertForSequenceClassification(hf.BertConfig(**BERT))
    on_xla, on_cpu = fit_on_both(model, [_labelled_text(), _labelled_text()])
    assert on_xla == pytest.approx(on_cpu, rel=TOLERANCE)
