"""Training against CPU torch: the same weights and batches give the same losses and parameters."""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional

import xlatrainer as xla
from xlatrainer.backend import counters

STEPS = 20
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class ConvNet(nn.Module):
    """The network of the MNIST recipe. Shapes: N x 1 x 28 x 28 to N x 10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 10, 5), nn.BatchNorm2d(10)
        self.conv2, self.bn2 = nn.Conv2d(10, 20, 5), nn.BatchNorm2d(20)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(functional.relu(functional.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(functional.relu(functional.max_pool2d(self.conv2(x), 2)))
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x.flatten(1)))), dim=1)


class Transformer(nn.Module):
    """A small causal transformer. Shapes: N x 12 token ids to N x 10."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(12, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(32), nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return functional.log_softmax(self.head(self.norm3(x).mean(1)), dim=-1)


class DenseNet(nn.Module):
    """Soon compiled, for what is a matter of the optimizer. Shapes: N x 12 to N x 10."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.last(functional.relu(self.norm(self.first(x)))), dim=1)


def _rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(16, 12), torch.randint(0, 10, (16,))) for _ in range(STEPS)]


def _images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(16, 1, 28, 28), torch.randint(0, 10, (16,))) for _ in range(STEPS)]


def _tokens() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randint(0, 50, (8, 12)), torch.randint(0, 10, (8,))) for _ in range(STEPS)]


def _losses(
    model: nn.Module, make: MakeOptimizer, batches: list[tuple[torch.Tensor, torch.Tensor]], device: str
) -> torch.Tensor:
    model.to(device)
    optimizer = make(model.parameters())
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.detach())
        xla.sync()
    return torch.stack(losses).cpu()


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "sgd nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
    "adam loop": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def _compare(model: nn.Module, batches: Batches, make: MakeOptimizer, dtype: torch.dtype) -> None:
    """In float64 everything must agree; in float32 a rounding may choose another maximum, after which runs part."""
    model = model.to(dtype)
    batches = [(inputs.to(dtype) if inputs.is_floating_point() else inputs, targets) for inputs, targets in batches]
    twin = copy.deepcopy(model)
    before = counters.snapshot()
    expected = _losses(model, make, batches, "cpu")
    losses = _losses(twin, make, batches, "xla")
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-4 if dtype is torch.float32 else 1e-9)
    if dtype is torch.float64:
        for (name, value), other in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(
                other.cpu(), value, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
            )
    used = {n for n, count in counters.snapshot().items() if n.startswith("aten::") and count > before.get(n, 0)}
    assert not used, f"operators that ran on the CPU: {sorted(used)}"


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer(name: str) -> None:
    _compare(DenseNet(), _rows(), OPTIMIZERS[name], torch.float64)


@pytest.mark.parametrize("name", ["sgd momentum", "adam"])
def test_convolutional_network(name: str) -> None:
    _compare(ConvNet(), _images(), OPTIMIZERS[name], torch.float64)


@pytest.mark.parametrize("name", ["sgd momentum", "adamw"])
def test_transformer(name: str) -> None:
    _compare(Transformer(), _tokens(), OPTIMIZERS[name], torch.float64)


@pytest.mark.parametrize("name", ["sgd momentum", "adam"])
def test_float32_losses_over_20_steps(name: str) -> None:
    _compare(ConvNet(), _images(), OPTIMIZERS[name], torch.float32)
    _compare(Transformer(), _tokens(), OPTIMIZERS[name], torch.float32)


def test_evaluation_uses_the_running_statistics() -> None:
    model = ConvNet()
    twin = copy.deepcopy(model).to("xla")
    for inputs, _ in _images()[:3]:
        model(inputs)
        twin(inputs.to("xla"))
    model.eval()
    twin.eval()
    with torch.no_grad():
        inputs = torch.randn(4, 1, 28, 28)
        torch.testing.assert_close(twin(inputs.to("xla")).cpu(), model(inputs), rtol=1e-4, atol=1e-4)
    assert twin.bn1.num_batches_tracked.item() == 3
