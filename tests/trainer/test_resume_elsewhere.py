"""A training on some devices goes on, on others and under another strategy, as if nothing had happened."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xlatrainer as xla
from tests.trainer.test_resume import Losses
from xlatrainer.distributed.sharding import get_sharding_spec, shard_shape
from xlatrainer.strategies import FSDPStrategy, Strategy
from xlatrainer.trainer.trainer import Trainer

STEPS_IN_AN_EPOCH = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "averages and accumulation": {"use_ema": True, "gradient_accumulation_steps": 2},
}
ELSEWHERE: dict[str, Callable[[], str | Strategy]] = {
    "fsdp2": lambda: FSDPStrategy(2),
    "single": lambda: "single",
    "ddp": lambda: "ddp",
    "zero1": lambda: "zero1",
}


def network() -> nn.Module:
    """With statistics, dropout and a tied weight; fsdp splits all its matrices."""
    torch.manual_seed(1)
    model = nn.Sequential(
        *(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)),
    )
    model[6].weight = model[4].weight
    return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(16, 32, generator=generator), torch.randint(0, 32, (16,), generator=generator))
        for _ in range(STEPS_IN_AN_EPOCH)
    ]


def trainer_with(
    strategy: str | Strategy, options: dict[str, Any], stop_after: int | None = None, **more: Any
) -> tuple[Trainer, list[float]]:
    losses = Losses(stop_after)
    xla.manual_seed(7)
    settings = {"optimizer": "adamw", "loss": "cross_entropy", "learning_rate": 1e-2, **options, **more}
    return Trainer(network(), strategy=strategy, callbacks=[losses], **settings), losses.losses


@cache
def undisturbed(name: str) -> tuple[float, ...]:
    trainer, losses = trainer_with("fsdp", OPTIONS[name])
    trainer.fit(batches(), epochs=2, verbose=0)
    return tuple(losses)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("fsdp2", "averages and accumulation"),
        ("single", "adamw"),
        ("ddp", "adamw"),
        ("zero1", "adamw"),
    ],
)
def test_the_losses_go_on(where: str, name: str, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch."""
    options = OPTIONS[name]
    trainer, first = trainer_with("fsdp", options, stop_after=5, output_dir=tmp_path)
    trainer.fit(batches(), epochs=2, verbose=0)
    assert len(first) == 5
    trainer, second = trainer_with(ELSEWHERE[where](), options, output_dir=tmp_path)
    for parameter in trainer.model.parameters():
        nn.init.zeros_(parameter)
    trainer.fit(batches(), epochs=2, verbose=0, resume_from="last")
    assert len(second) == 3
    assert first + second == pytest.approx(undisturbed(name), rel=1e-4)


@pytest.mark.parametrize("devices", [2, 8])
def test_state_lies_where_the_strategy_says(devices: int, tmp_path: Path) -> None:
    """Before the first step after loading, not only from then on."""
    name = "averages and accumulation"
    trainer, _ = trainer_with("single", OPTIONS[name], output_dir=tmp_path)
    trainer.fit(batches()[:3], verbose=0, max_steps=1)
    trainer.save(tmp_path / "state")
    fresh, _ = trainer_with(FSDPStrategy(devices), OPTIONS[name])
    fresh.load(tmp_path / "state")
    weight = fresh.model[0].weight
    held = [*fresh.optimizer.state[weight].values(), fresh.ema.averages["0.weight"], weight]
    sharded = [tensor for tensor in held if tensor.dim()]
    assert len(sharded) == 4
    for tensor in sharded:
        assert get_sharding_spec(tensor) == get_sharding_spec(weight)
        assert shard_shape(tensor)[0] * devices == 32 or shard_shape(tensor)[1] * devices == 32
