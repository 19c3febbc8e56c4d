"""Train a small GPT on a play of Shakespeare's, byte by byte, and let it write: PyTorch on one or several devices.

The play lies next to this file; `--text` takes another. Eight devices of a CPU to try the strategies on:

    python recipes/gpt.py
    CPU_NUM_DEVICES=8 python recipes/gpt.py --strategy fsdp --describe
    CPU_NUM_DEVICES=4 python recipes/gpt.py --mesh data=2,model=2
    CPU_NUM_DEVICES=2 torchrun --nproc-per-node 2 recipes/gpt.py --mesh data=2,model=2
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import xlatrainer as xla
from xlatrainer.distributed import Mesh
from xlatrainer.distributed.processes import is_first
from xlatrainer.strategies import MeshStrategy, Strategy
from xlatrainer.trainer import WarmupCosineLR

SHIPPED_TEXT = Path(__file__).parent / "data" / "shakespeare" / "as_you_like_it.txt"
VOCABULARY = 256  # bytes
HELD_OUT = 0.1  # the part of the text, its end, that is validated on
STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "auto")

# Over the axis "model": heads and the inner width of the MLP are split, so that each block adds up over the devices
# after the attention and after the MLP, and nowhere else. The weight of a Linear is (out, in).
PLAN = {
    "blocks.*.query": ("model", None),
    "blocks.*.key": ("model", None),
    "blocks.*.value": ("model", None),
    "blocks.*.out": (None, "model"),
    "blocks.*.up": ("model", None),
    "blocks.*.up.bias": ("model",),
    "blocks.*.down": (None, "model"),
}


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and added to its input: (rows, length, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes (rows, length) to the scores of the byte that follows each, (rows, 256, length)."""

    def __init__(self, width: int, blocks: int, heads: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text: `length` bytes, and the same shifted by one. A new one begins every `stride` bytes."""

    def __init__(self, text: Tensor, length: int, stride: int = 1) -> None:
        self.text, self.length, self.stride = text, length, stride

    def __len__(self) -> int:
        return max(0, (len(self.text) - self.length - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.stride :][: self.length + 1].long()
        return piece[:-1], piece[1:]


def read_text(path: str) -> tuple[Tensor, Tensor]:
    """The bytes of a file, uint8, to train and to validate on."""
    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    train, held_out = text.split([len(text) - int(HELD_OUT * len(text)), int(HELD_OUT * len(text))])
    return train, held_out


@torch.no_grad()
def write(model: nn.Module, start: Tensor, count: int, temperature: float) -> str:
    """What `model` goes on with after the bytes `start`, `count` bytes that it draws one after the other."""
    model.eval()
    window = start.long().unsqueeze(0).to("xla")
    drawn = []
    for _ in range(count):
        probabilities = F.softmax(model(window)[0, :, -1] / temperature, dim=0)
        drawn.append(torch.multinomial(probabilities, 1))
        window = torch.cat([window[:, 1:], drawn[-1].unsqueeze(0)], dim=1)  # of the same shape: one program for all
        xla.sync()
    return bytes(torch.cat(drawn).tolist()).decode("utf-8", errors="replace")


def say(text: str) -> None:
    """Print, once where there are several processes."""
    if is_first():
        print(text, flush=True)


def parse_mesh(text: str) -> dict[str, int]:
    """ "data=2,model=2" as the sizes of axes."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("data", "model") or name in axes or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is no mesh; give data=N, model=N or both: data=2,model=2")
        axes[name] = int(size)
    return axes


def make_strategy(options: argparse.Namespace) -> str | Strategy:
    if options.mesh is None:
        return str(options.strategy)
    if options.heads % options.mesh.get("model", 1):
        raise SystemExit(f"--mesh: {options.heads} heads cannot be split over {options.mesh['model']} devices")
    try:
        mesh = Mesh(range(math.prod(options.mesh.values())), tuple(options.mesh.values()), tuple(options.mesh))
    except ValueError as error:
        raise SystemExit(f"--mesh: {error}") from error
    return MeshStrategy(mesh, PLAN if "model" in options.mesh else {})


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the bytes of a text through XLA, and print what it then writes.",
        epilog="CPU_NUM_DEVICES=8 in the environment makes eight devices of a CPU.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--strategy", choices=STRATEGIES, default="single", help="what each device has, see docs/sharding.md"
    )
    where.add_argument(
        "--mesh", type=parse_mesh, help="devices in a grid, data=2,model=2: batches over one axis, heads over the other"
    )
    parser.add_argument("--steps", type=int, default=300, help="updates (default: 300)")
    parser.add_argument("--batch_size", type=int, default=16, help="pieces of text in a batch (default: 16)")
    parser.add_argument("--length", type=int, default=64, help="bytes of a piece (default: 64)")
    parser.add_argument("--width", type=int, default=128, help="of the embeddings (default: 128)")
    parser.add_argument("--blocks", type=int, default=2, help="attention and MLP, so many times (default: 2)")
    parser.add_argument("--heads", type=int, default=4, help="of each attention; they divide the width (default: 4)")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate (default: 0.003)")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16-mixed or bf16 (default: fp32)")
    parser.add_argument("--eval_every", type=int, default=100, help="steps to the next validation (default: 100)")
    parser.add_argument("--sample", type=int, default=300, help="bytes that it writes at the end (default: 300)")
    parser.add_argument("--temperature", type=float, default=0.8, help="below 1 it dares less (default: 0.8)")
    parser.add_argument("--text", default=str(SHIPPED_TEXT), help="a file (default: As You Like It)")
    parser.add_argument("--seed", type=int, default=42, help="of weights, order and sample (default: 42)")
    parser.add_argument("--describe", action="store_true", help="print what lies where, in bytes a device")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> Mapping[str, list[float]]:
    """Train, and print what the model writes; returns the history: "loss" and "val_loss" in nats a byte."""
    options = parse_arguments(arguments)
    strategy = make_strategy(options)
    train, held_out = read_text(options.text)
    if len(held_out) <= options.length:
        raise SystemExit(f"the text is too short for --length {options.length}: {len(train) + len(held_out):,} bytes")
    torch.manual_seed(options.seed)
    xla.manual_seed(options.seed)
    batches = DataLoader(
        Windows(train, options.length),
        options.batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(options.seed),
    )
    model = GPT(options.width, options.blocks, options.heads, options.length)
    trainer = xla.Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95)),
        loss="cross_entropy",
        strategy=strategy,
        global_clipnorm=1.0,
        precision=options.precision,
        pad_last_batch=True,
        scheduler=lambda optimizer: WarmupCosineLR(optimizer, options.steps // 10, options.steps),
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    say(f"GPT of {size:,} parameters, {type(trainer.strategy).__name__}, {len(train):,} bytes to train on")
    history = trainer.fit(
        batches,
        epochs=math.ceil(options.steps / options.eval_every),
        steps_per_epoch=options.eval_every,
        max_steps=options.steps,
        validation_data=DataLoader(Windows(held_out, options.length, options.length), options.batch_size),
        verbose=2,
    )
    if options.describe:
        say(trainer.strategy.describe())
    say(f"loss on the text held out: {history.history['val_loss'][-1]:.3f} nats a byte")
    say("It goes on writing:")
    say(write(model, held_out[: options.length], options.sample, options.temperature))
    return history.history


if __name__ == "__main__":
    main()
