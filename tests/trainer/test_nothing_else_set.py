"""`Trainer(model).fit(loader)` with nothing else set. tests/models does the same with a ResNet and a BERT."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xlatrainer as xla

EPOCHS = 30


def test_a_regressor() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(200, 5)
    targets = inputs[:, :1] * 2 - inputs[:, 1:2].square()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters())
    torch.manual_seed(1)
    expected = []
    for _ in range(EPOCHS):
        total = 0.0
        for batch, wanted in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(reference(batch), wanted)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        expected.append(total / 200)
    torch.manual_seed(1)
    losses = xla.Trainer(model).fit(loader, epochs=EPOCHS, verbose=0).history["loss"]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] / 2
