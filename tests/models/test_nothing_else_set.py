"""`Trainer(model).fit(loader)` with nothing else set: losses fall, and are those of a loop written by hand on the CPU.

Optimizer (AdamW), loss and device are what the Trainer chooses by itself.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import xlatrainer as xla

pytestmark = pytest.mark.models

CLASSES, ROWS, BATCH = 4, 44, 16  # the last batch is short


def by_hand(model: nn.Module, loader: Any, epochs: int, loss_of: Callable[[nn.Module, Any], Tensor]) -> list[float]:
    """The mean loss of each epoch, by a loop as one writes it."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    means = []
    for _ in range(epochs):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch["labels"] if isinstance(batch, dict | hf.BatchEncoding) else batch[1])
        means.append(total / ROWS)
    return means


def images(dtype: torch.dtype) -> DataLoader[Any]:
    """Noise around an image for each class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(ROWS) % CLASSES
    inputs = torch.randn(CLASSES, 3, 32, 32, generator=generator)[labels] + torch.randn(
        ROWS, 3, 32, 32, generator=generator
    )
    return DataLoader(TensorDataset(inputs.to(dtype), labels), batch_size=BATCH)


def test_resnet18() -> None:
    """In float64: rounding errors of float32 grow in a batch norm over few numbers, on the CPU just as well."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=CLASSES).double()
    loader = images(torch.float64)
    expected = by_hand(copy.deepcopy(model), loader, 3, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    losses = xla.Trainer(model).fit(loader, epochs=3, verbose=0).history["loss"]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[-1] < losses[0] / 10


def test_resnet18_in_float32() -> None:
    torch.manual_seed(0)
    losses = xla.Trainer(torchvision.models.resnet18(num_classes=CLASSES)).fit(
        images(torch.float32), epochs=3, verbose=0
    )
    assert losses.history["loss"][-1] < losses.history["loss"][0] / 10


def examples() -> list[dict[str, Any]]:
    """Texts whose class is the id that they are full of, of different lengths before they are padded."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for row in range(ROWS):
        ids = torch.randint(3, 50, (16,), generator=generator)
        ids[::2] = row % 2 + 1
        mask = (torch.arange(16) < 16 - row % 5).long()
        found.append({"input_ids": (ids * mask).tolist(), "attention_mask": mask.tolist(), "label": row % 2})
    return found


def collated(features: list[dict[str, Any]]) -> Any:
    return hf.default_data_collator(features)


def encoded(features: list[dict[str, Any]]) -> Any:
    return hf.BatchEncoding(hf.default_data_collator(features))


@pytest.mark.parametrize("collate", [collated, encoded], ids=["dict", "BatchEncoding"])
def test_bert(collate: Callable[[list[dict[str, Any]]], Any]) -> None:
    """A batch is what a data collator makes, the loss is the model's own, predictions are its logits."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,  # the devices draw different random numbers
        attention_probs_dropout_prob=0.0,
    )
    model = hf.BertForSequenceClassification(config)
    loader: DataLoader[Any] = DataLoader(examples(), batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]
    reference = copy.deepcopy(model)
    expected = by_hand(reference, loader, 8, lambda model, batch: model(**batch).loss)
    trainer = xla.Trainer(model, metrics=["accuracy", "f1"])
    history = trainer.fit(loader, epochs=8, verbose=0).history
    assert history["loss"] == pytest.approx(expected, rel=1e-3)
    assert history["loss"][-1] < history["loss"][0] / 2
    reference.eval()
    with torch.no_grad():
        logits = torch.cat([reference(**batch).logits for batch in loader])
    predicted = trainer.predict(loader, verbose=0)
    assert predicted.shape == (ROWS, 2)
    assert torch.equal(predicted.argmax(1), logits.argmax(1))
    assert (
        trainer.evaluate(loader, verbose=0)["accuracy"] == (logits.argmax(1) == torch.arange(ROWS) % 2).float().mean()
    )


def test_a_causal_model_and_its_perplexity() -> None:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    ids = (torch.arange(16) + torch.arange(ROWS)[:, None]) % 20
    trainer = xla.Trainer(hf.GPT2LMHeadModel(config), metrics=[xla.metrics.Perplexity(shift=True)], learning_rate=0.01)
    history = trainer.fit({"input_ids": ids, "labels": ids}, batch_size=BATCH, epochs=4, verbose=0).history
    assert history["loss"][-1] < history["loss"][0] / 2
    values = trainer.evaluate({"input_ids": ids, "labels": ids}, batch_size=BATCH, verbose=0)
    assert values["perplexity"] == pytest.approx(torch.tensor(values["loss"]).exp().item(), rel=1e-4)
