"""The models that the benchmarks train: plain PyTorch, made here so that no peer needs more than torch.

Each function returns `(model, batches)`: a model with its initial weights drawn from the seed, and an endless supply of
different batches `(inputs, targets)` on the CPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BENCHMARKS", "Benchmark"]

Batch = tuple[Tensor, Tensor]


class ConvNet(nn.Module):
    """The network of `recipes/mnist.py`: images (N, 1, 28, 28) to log-probabilities (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 10, 5), nn.BatchNorm2d(10)
        self.conv2, self.bn2 = nn.Conv2d(10, 20, 5), nn.BatchNorm2d(20)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., 2015, figure 5 left)."""

    expansion = 1

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(width_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut (He et al., 2015, figure 5 right; the stride in the 3x3)."""

    expansion = 4

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(width_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def _shortcut(width_in: int, width: int, stride: int) -> nn.Module:
    if stride == 1 and width_in == width:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))


def resnet(block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    width_in = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for index in range(depth):
            layers.append(block(width_in, width, 2 if stage and not index else 1))
            width_in = width * block.expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, classes))


class Attention(nn.Module):
    """Causal self-attention over `heads` heads: (N, T, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class GptBlock(nn.Module):
    """Attention and a feed-forward network, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A decoder-only transformer: tokens (N, T), int64, to logits (N * T, vocabulary)."""

    def __init__(self, layers: int = 4, width: int = 256, heads: int = 8, length: int = 128, vocabulary: int = 256):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


def _images(rows: int, channels: int, size: int, classes: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield (
            torch.randn(rows, channels, size, size, generator=generator),
            torch.randint(0, classes, (rows,), generator=generator),
        )


def _tokens(rows: int, length: int, vocabulary: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        text = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
        yield text[:, :-1].contiguous(), text[:, 1:].flatten()


@dataclass(frozen=True)
class Benchmark:
    """A model with its optimizer and batches.

    `optimizer` makes one of the parameters that it is given, with the numbers that other frameworks' updates need;
    the loss is cross-entropy.
    """

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[], Iterator[Batch]]
    optimizer: "partial[torch.optim.Optimizer]"


_sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
_adamw = partial(torch.optim.AdamW, lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("mnist", ConvNet, lambda: _images(128, 1, 28, 10), _sgd),
        Benchmark("resnet18", lambda: resnet(BasicBlock, (2, 2, 2, 2)), lambda: _images(8, 3, 64, 1000), _sgd),
        Benchmark("resnet50", lambda: resnet(Bottleneck, (3, 4, 6, 3)), lambda: _images(8, 3, 64, 1000), _sgd),
        Benchmark("gpt", Gpt, lambda: _tokens(8, 128, 256), _adamw),
    )
}
