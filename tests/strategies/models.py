"""Models and data that all strategies train, and how they are trained."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xlatrainer as xla
from xlatrainer.callbacks.callback import Callback
from xlatrainer.distributed import Mesh
from xlatrainer.strategies import DDPStrategy, FSDPStrategy, HSDPStrategy, MeshStrategy, Strategy
from xlatrainer.trainer.trainer import Trainer

STEPS = 20


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of shape (rows, vocabulary, length); the embedding and the head are one weight."""

    def __init__(self, vocabulary: int = 64, width: int = 64, blocks: int = 1, length: int = 16) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.token(tokens) + positions))).transpose(1, 2)


class Bigram(nn.Module):
    """Takes and gives what `GPT` does, from each token alone; compiled in a fraction of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.dropout(self.token(tokens), 0.1, self.training)).transpose(1, 2)


def cnn() -> nn.Module:
    """With batch norm and dropout."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"bigram": Bigram, "cnn": cnn, "gpt": GPT}
PLANS: dict[str, dict[str, Any]] = {
    "bigram": {"token": (None, "model"), "head": (None, "model")},
    "cnn": {"9": ("model", None), "12": (None, "model")},
    "gpt": {
        "blocks.*.qkv": ("model", None),
        "blocks.*.up": ("model", None),
        "blocks.*.proj": (None, "model"),
        "blocks.*.down": (None, "model"),
    },
}


def batches(kind: str, steps: int = STEPS, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    if kind != "cnn":
        draw = [torch.randint(0, 64, (rows, 17), generator=generator) for _ in range(steps)]
        return [(tokens[:, :-1], tokens[:, 1:]) for tokens in draw]
    return [
        (torch.randn(rows, 3, 16, 16, generator=generator), torch.randint(0, 10, (rows,), generator=generator))
        for _ in range(steps)
    ]


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[kind]()


def strategy_of(name: str, kind: str) -> str | Strategy:
    if name == "tensor_parallel":
        return MeshStrategy(Mesh(range(8), (4, 2), ("data", "model")), PLANS[kind])
    made: dict[str, Callable[[], Strategy]] = {
        "ddp2": lambda: DDPStrategy(2),
        "ddp4": lambda: DDPStrategy(4),
        "fsdp2": lambda: FSDPStrategy(2),
        "fsdp_kept": lambda: FSDPStrategy(reshard_after_forward=False),
        "hsdp4": lambda: HSDPStrategy(replicas=4),
    }
    return made[name]() if name in made else name


class Losses(Callback):
    """The loss after each batch: the mean over the epoch so far."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["loss"]))


def trained(
    kind: str, strategy: str | Strategy, data: list[Any] | None = None, **options: Any
) -> tuple[Trainer, list[float]]:
    """A Trainer that has made a pass over the data, and its losses."""
    losses = Losses()
    xla.manual_seed(7)
    settings: dict[str, Any] = {"optimizer": "adamw", "loss": "cross_entropy", "learning_rate": 1e-3, **options}
    trainer = Trainer(model_of(kind), strategy=strategy, callbacks=[losses], **settings)
    trainer.fit(batches(kind) if data is None else data, verbose=0)
    return trainer, losses.seen
