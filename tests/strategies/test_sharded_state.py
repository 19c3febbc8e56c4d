"""What devices hold of a training and send to one another: the arrays at each step's end, and the compiled program."""

import gc
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import pytest
import torch
from torch import Tensor

from tests.strategies.models import GPT, batches
from xlatrainer.backend.program import live_programs
from xlatrainer.backend.tensor import storage_data
from xlatrainer.callbacks.callback import Callback
from xlatrainer.trainer.trainer import Trainer

DEVICES = 8
WIDTH = 256  # so that what has one dimension, and stays whole, is little


class Holdings(Callback):
    """The bytes on each device at the end of each step: of parameters and optimizer state, and of all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.of_training: list[dict[int, int]] = []
        self.of_all: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        gc.collect()
        self.of_all.append(sum(held_by_one(array) for array in jax.live_arrays() if not array.is_deleted()))
        held: Counter[int] = Counter()
        for tensor in tensors_of(self.trainer):
            for shard in storage_data(tensor).value.buffer.addressable_shards:
                held[shard.device.id] += shard.data.nbytes
        self.of_training.append(dict(held))


def held_by_one(array: jax.Array) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def tensors_of(trainer: Trainer) -> list[Tensor]:
    state = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
    return [*trainer.model.parameters(), *(value for value in state if value.device.type == "xla")]


@dataclass
class Trained:
    shapes: dict[str, tuple[int, ...]]
    holdings: Holdings
    before: int  # bytes that a device held of others' arrays
    description: str
    text: str  # the training program, after XLA's passes


@cache
def trained(strategy: str) -> Trained:
    torch.manual_seed(1)
    model = GPT(vocabulary=64, width=WIDTH, blocks=1, length=16)
    trainer = Trainer(model, loss="cross_entropy", strategy=strategy)
    gc.collect()
    own = sum(held_by_one(storage_data(parameter).value.buffer) for parameter in model.parameters())
    before = sum(held_by_one(array) for array in jax.live_arrays() if not array.is_deleted()) - own
    known = set(map(id, live_programs()))
    holdings = Holdings()
    trainer.fit(batches("gpt", 4), verbose=0, callbacks=[holdings])
    program = max((p for p in live_programs() if id(p) not in known), key=lambda program: program.runs)
    assert program.runs >= 3
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Trained(shapes, holdings, before, trainer.strategy.describe(), program._loaded.as_text())


def collectives(text: str) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of the results of each kind of collective, without dimensions of size 1 and in no order."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for line in text.splitlines():
        matched = re.search(r" = (.+?) (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", line)
        if matched:
            for dimensions in re.findall(r"\w+\[([\d,]*)\]", matched[1]):
                sizes = [int(size) for size in dimensions.split(",") if size]
                found.setdefault(matched[2], []).append(unordered(sizes))
    return found


def unordered(shape: Any) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size != 1))


def sharded(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shape for shape in shapes.values() if len(shape) > 1]


def test_fsdp_holds_an_eighth_at_every_step() -> None:
    single, fsdp = trained("single"), trained("fsdp")
    (whole,) = single.holdings.of_training[-1].values()
    assert whole == pytest.approx(3 * 4 * sum(map(math.prod, single.shapes.values())), rel=1e-4)  # Adam's two moments
    assert len(fsdp.holdings.of_training) == 4
    for held in fsdp.holdings.of_training:
        assert len(held) == DEVICES
        assert max(held.values()) <= whole / DEVICES * 1.05
    for of_all in fsdp.holdings.of_all:  # and there is nothing beside it: no gradients, no whole parameters
        assert of_all - fsdp.before <= whole / DEVICES * 1.05 + 4096


def test_ddp_holds_everything() -> None:
    single, ddp = trained("single"), trained("ddp")
    (whole,) = single.holdings.of_training[-1].values()
    for held in ddp.holdings.of_training:
        assert set(held.values()) == {whole}
        assert len(held) == DEVICES


def test_fsdp_gathers_parameters_and_scatters_gradients() -> None:
    fsdp = trained("fsdp")
    found = collectives(fsdp.text)
    gathered, scattered = Counter(found["all-gather"]), Counter(found["reduce-scatter"])
    assert Counter(map(unordered, sharded(fsdp.shapes))) <= gathered
    parts = [unordered(part_of(fsdp.description, name)) for name, shape in fsdp.shapes.items() if len(shape) > 1]
    assert Counter(parts) <= scattered
    reduced = [math.prod(shape) for shape in found["all-reduce"]]
    assert max(reduced) < min(map(math.prod, sharded(fsdp.shapes)))
    whole = sum(math.prod(shape) for shape in fsdp.shapes.values() if len(shape) == 1)
    assert whole <= sum(reduced) < whole + 64  # the gradients of what is not sharded, and some numbers


def test_hsdp_adds_up_shards_alone_between_its_groups() -> None:
    hsdp = trained("hsdp")
    found = collectives(hsdp.text)
    matrices = sharded(hsdp.shapes)
    assert Counter(map(unordered, matrices)) <= Counter(found["all-gather"])
    assert sum(map(math.prod, found["reduce-scatter"])) >= sum(map(math.prod, matrices)) // 4  # of 2 groups of 4
    whole = sum(math.prod(shape) for shape in hsdp.shapes.values() if len(shape) == 1)
    assert sum(map(math.prod, found["all-reduce"])) < whole + sum(map(math.prod, found["reduce-scatter"])) + 64


def part_of(description: str, name: str) -> list[int]:
    """The shape of a device's part of a parameter, as the table says it."""
    row = re.search(rf"^{re.escape(name)} +([\dx]+) +(\S+), (\S+) ", description, re.MULTILINE)
    assert row is not None
    sizes = zip(row[1].split("x"), row.groups()[1:], strict=True)
    return [int(size) // (1 if axis == "-" else DEVICES) for size, axis in sizes]


def test_ddp_sums_gradients_and_gathers_nothing() -> None:
    ddp = trained("ddp")
    found = collectives(ddp.text)
    assert set(found) == {"all-reduce"}
    reduced = Counter(found["all-reduce"])
    assert Counter(map(unordered, sharded(ddp.shapes))) <= reduced
    assert sum(map(math.prod, found["all-reduce"])) >= sum(map(math.prod, ddp.shapes.values()))


def test_one_device_sends_nothing() -> None:
    assert collectives(trained("single").text) == {}


def test_the_account() -> None:
    single, fsdp, ddp = (trained(strategy) for strategy in ("single", "fsdp", "ddp"))
    assert single.description == "everything is on xla:0"
    lines = fsdp.description.splitlines()
    assert lines[0] == f"FSDPStrategy on Mesh({{'fsdp': 8}}, device_ids={list(range(8))})"
    assert lines[1].split("  ")[0] == "parameter"
    assert len(lines) == 3 + len(fsdp.shapes)
    assert re.search(r"^blocks\.0\.up\.weight +1024x256 +fsdp, - +131,072 +393,216$", fsdp.description, re.MULTILINE)
    assert re.search(r"^blocks\.0\.down\.weight +256x1024 +-, fsdp +131,072 ", fsdp.description, re.MULTILINE)
    assert re.search(r"^norm\.bias +256 +whole +1,024 +3,072$", fsdp.description, re.MULTILINE)
    for each in (fsdp, ddp):
        held = max(each.holdings.of_training[-1].values())
        assert f"parameters and optimizer state: {held:,} bytes on each of 8 devices" in each.description
