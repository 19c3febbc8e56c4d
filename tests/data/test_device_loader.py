"""Batches on the device: nests of all kinds, the ends of steps, shards, and what the arguments may be."""

import itertools
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import xlatrainer as xla
from tests.trainer.test_fit_counts import counted
from xlatrainer.backend import transfer
from xlatrainer.data.device_loader import (
    MpDeviceLoader,
    ParallelLoader,
    send_cpu_data_to_device,
    shard_batch,
)
from xlatrainer.distributed import Mesh, ShardingSpec, get_sharding_spec
from xlatrainer.distributed.sharding import shard_shape
from xlatrainer.nested import DataWrapper

Pair = namedtuple("Pair", ["a", "b"])


@dataclass(frozen=True)
class Sample:
    image: Tensor
    name: str


class Boxes(DataWrapper):
    def __init__(self, corners: Tensor, names: list[str]) -> None:
        self.corners, self.names = corners, names

    def get_tensors(self) -> list[Any]:
        return [self.corners]

    def from_tensors(self, tensors: list[Any]) -> "Boxes":
        return Boxes(tensors[0], self.names)


def on_xla(tensor: Any, *values: float) -> bool:
    return tensor.device.type == "xla" and tensor.cpu().flatten().tolist() == list(values)


def test_nests_keep_their_structure() -> None:
    batch = {
        "tuple": (torch.ones(1), [np.full(2, 3.0, np.float32), None]),
        "named": Pair(torch.zeros(1), "text"),
        "sample": Sample(torch.full((1,), 2.0), "first"),
        "boxes": Boxes(torch.ones(2), ["a"]),
        5: b"bytes",
    }
    (moved,) = MpDeviceLoader([batch], "xla")
    assert on_xla(moved["tuple"][0], 1.0)
    assert on_xla(moved["tuple"][1][0], 3.0, 3.0)
    assert moved["tuple"][1][1] is None
    assert isinstance(moved["tuple"], tuple)
    assert isinstance(moved["named"], Pair)
    assert on_xla(moved["named"].a, 0.0)
    assert moved["named"].b == "text"
    assert on_xla(moved["sample"].image, 2.0)
    assert moved["sample"].name == "first"
    assert on_xla(moved["boxes"].corners, 1.0, 1.0)
    assert moved["boxes"].names == ["a"]
    assert moved[5] == b"bytes"


TENSORS: dict[str, Callable[[], Tensor]] = {
    "bfloat16": lambda: torch.arange(6).bfloat16().reshape(2, 3),
    "bool": lambda: torch.tensor([True, False]),
    "int64": lambda: torch.tensor([2**40, -1]),
    "complex": lambda: torch.tensor([1 + 2j]).conj(),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3.0),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "channels last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.arange(12.0).reshape(3, 4)[:, ::2],
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "with gradient": lambda: torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_as_torch_would_copy_it(name: str) -> None:
    given = TENSORS[name]()
    expected, uploaded = given.to("xla"), transfer.uploaded(given)
    assert (uploaded.shape, uploaded.dtype, uploaded.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert torch.equal(uploaded.detach().cpu(), given.detach())
    assert uploaded.requires_grad == given.requires_grad
    assert uploaded.is_leaf


def test_a_copy_is_no_part_of_what_is_recorded() -> None:
    pending = torch.ones(3, device="xla") + 1
    with counted() as counts:
        send_cpu_data_to_device([torch.ones(2)] * 3, "xla")
    assert (counts["TransferToDevice"], counts["Execute"]) == (3, 0)
    assert pending.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="make it dense first"):
        transfer.uploaded(torch.eye(2).to_sparse())


def training(steps: int = 12, **options: Any) -> tuple[Callable[[], None], list[Tensor]]:
    """A plain loop over a device loader, and what it read."""
    model = nn.Linear(3, 1).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = MpDeviceLoader([torch.full((2, 3), float(step)) for step in range(steps)], **options)
    losses: list[Tensor] = []

    def loop() -> None:
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    return loop, losses


@pytest.mark.parametrize(("every", "executions"), [(1, 12), (4, 3), (5, 3), (100, 1)])
def test_each_batch_ends_a_step(every: int, executions: int) -> None:
    loop, losses = training(batches_per_execution=every)
    loop()
    with counted() as counts:
        loop()
    assert counts["Execute"] == executions
    assert counts["MarkStep"] == executions + 1
    assert counts["TransferToDevice"] == 12
    assert counts["UncachedCompile"] == 0 or every not in (1, 4)
    assert all(transfer.is_ready(loss) or loss.item() >= 0 for loss in losses)


def test_the_batches_are_those_of_the_loader() -> None:
    loader = DataLoader(TensorDataset(torch.arange(40)), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    twice = [[batch[0].tolist() for batch in loader] for _ in range(2)]
    loader.generator.manual_seed(1)
    wrapped = MpDeviceLoader(loader, "xla", loader_prefetch_size=2, device_prefetch_size=1)
    assert [[batch[0].tolist() for batch in wrapped] for _ in range(2)] == twice
    assert len(wrapped) == 10


def test_what_it_does_not_have_is_the_loaders() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), 2)
    wrapped = MpDeviceLoader(loader)
    assert wrapped.dataset is loader.dataset
    assert wrapped.batch_size == 2
    with pytest.raises(AttributeError, match="neither MpDeviceLoader nor its DataLoader has 'colour'"):
        _ = wrapped.colour
    with pytest.raises(AttributeError, match="_hidden"):
        _ = wrapped._hidden


def test_a_loader_without_a_length() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(TypeError):
        len(MpDeviceLoader(DataLoader(Stream())))
    assert [batch.item() for batch in MpDeviceLoader(DataLoader(Stream()))] == [0, 1, 2]


def test_parallel_loader() -> None:
    loader = ParallelLoader([torch.ones(1), torch.zeros(1)], [xla.device()], batchdim=1)
    assert loader.batch_dim == 1
    passing = loader.per_device_loader("xla")
    assert len(passing) == 2
    assert on_xla(passing.next(), 1.0)
    assert on_xla(next(passing), 0.0)
    assert [list(passing), list(passing)] == [[], []]
    passing.close()
    again = loader.per_device_loader(xla.device())
    next(again)
    loader.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        next(again)


def test_on_the_cpu_nothing_is_copied_or_ended() -> None:
    batch = torch.ones(2)
    with counted() as counts:
        assert [found is batch for found in MpDeviceLoader([batch], "cpu")] == [True]
    assert (counts["TransferToDevice"], counts["MarkStep"]) == (0, 0)


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ([], ValueError, "devices must name the device"),
        (["xla:0", "xla:0"], ValueError, "devices are xla:0, xla:0, but a process has one torch device"),
        (["xla:0", "xla:1"], IndexError, "there is no device xla:1"),
        ("xla:3", IndexError, "there is no device xla:3"),
    ],
)
def test_devices_that_do_not_exist(devices: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ParallelLoader([], devices)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loader_prefetch_size": 0}, ValueError, "loader_prefetch_size must be at least 1, got 0"),
        ({"device_prefetch_size": 1.5}, TypeError, "device_prefetch_size must be an int, got 1.5"),
        ({"host_to_device_transfer_threads": 0}, ValueError, "host_to_device_transfer_threads must be at least 1"),
        ({"batches_per_execution": 0}, ValueError, "batches_per_execution must be at least 1"),
        ({"batchdim": -1}, ValueError, "batchdim must be the number of a dimension"),
        ({"input_sharding": "data"}, TypeError, r"input_sharding must have a method apply\(tensor\).*got str"),
        ({"input_sharding": {"x": 3}}, TypeError, "got int"),
        ({"prefetch": 3}, TypeError, "unexpected keyword argument 'prefetch'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MpDeviceLoader([], "xla", **options)


def test_wrong_loaders_and_devices() -> None:
    with pytest.raises(TypeError, match="iterable of batches is needed, got int"):
        MpDeviceLoader(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this loader is for xla:0, not for cpu"):
        ParallelLoader([], "xla").per_device_loader("cpu")


class Doubled:
    """Stands in for a sharding: what it does shows that it was asked."""

    def apply(self, tensor: Tensor) -> Tensor:
        return (tensor * 2).to("xla")


def test_shardings() -> None:
    (moved,) = MpDeviceLoader([(torch.ones(1), "a")], input_sharding=Doubled())
    assert on_xla(moved[0], 2.0)
    batch = {"x": [torch.ones(1)], "y": torch.ones(1), "name": "a"}
    (moved,) = MpDeviceLoader([batch], input_sharding={"x": Doubled(), "y": None})
    assert on_xla(moved["x"][0], 2.0)
    assert on_xla(moved["y"], 1.0)
    assert moved["name"] == "a"


def test_several_chips() -> None:
    mesh = Mesh(range(4), (4,), ("data",))
    spec = ShardingSpec(mesh, ("data", None))
    batch = {"x": torch.arange(8.0).reshape(4, 2), "y": torch.arange(4)}
    for sharding in (spec, {"x": spec, "y": None}):
        (moved,) = MpDeviceLoader([batch], input_sharding=sharding)
        assert (get_sharding_spec(moved["x"]), shard_shape(moved["x"])) == (("data", None), (1, 2))
        assert shard_shape(moved["y"]) == (4,)
        assert torch.equal((moved["x"] + moved["y"][:, None]).cpu(), batch["x"] + batch["y"][:, None])
    with pytest.raises(ValueError, match="3"):
        next(iter(MpDeviceLoader([torch.ones(3, 2)], input_sharding=spec)))


@pytest.mark.parametrize(
    ("batch", "sharding", "message"),
    [
        ((torch.ones(1),), {"x": None}, r"a dict with the keys \['x'\].*it is a tuple"),
        ({"x": torch.ones(1), "y": torch.ones(1)}, {"x": None}, r"has the keys \['x'\], the batch \['x', 'y'\]"),
        ({"x": torch.ones(1)}, {"x": None, "z": None}, r"has the keys \['x', 'z'\]"),
        ({"x": torch.ones(1, device="meta")}, Doubled(), "a tensor to be sharded must be on the CPU"),
    ],
)
def test_shardings_that_do_not_fit(batch: Any, sharding: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(iter(MpDeviceLoader([batch], input_sharding=sharding)))


def test_shards_of_a_batch() -> None:
    batch = {"x": torch.arange(6).reshape(2, 3), "y": np.arange(6).reshape(2, 3), "scale": torch.tensor(2), "n": "a"}
    first, second = shard_batch(batch, 2)
    assert (first["x"].tolist(), second["y"].tolist()) == ([[0, 1, 2]], [[3, 4, 5]])
    assert (second["scale"].item(), second["n"]) == (2, "a")
    assert [shard["x"].tolist() for shard in shard_batch({"x": batch["x"]}, 3, 1)] == [
        [[0], [3]],
        [[1], [4]],
        [[2], [5]],
    ]
    assert [shard.tolist() for shard in shard_batch(torch.arange(5), 2, uneven=True)] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (torch.arange(5), {}, "5 rows cannot be split evenly among 2 shards"),
        (torch.arange(1), {"uneven": True}, "1 rows cannot be split evenly among 2 shards"),
        ((torch.arange(4), torch.arange(6)), {}, r"the same size in dimension 0, got \[4, 6\]"),
        ("text", {}, r"the same size in dimension 0, got \[\]"),
    ],
)
def test_batches_that_cannot_be_split(batch: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch(batch, 2, **options)


# in a Trainer


def trainer() -> xla.Trainer:
    torch.manual_seed(3)
    return xla.Trainer(nn.Linear(4, 2), "sgd", "mse", learning_rate=0.05)


def examples(rows: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator))


def test_a_trainer_trains_the_same() -> None:
    def fitted(wrap: Callable[[Any], Any]) -> tuple[xla.Trainer, Any]:
        training = trainer()
        torch.manual_seed(1)
        loader = wrap(DataLoader(examples(), 8, shuffle=True))
        held_out = wrap(DataLoader(examples(16), 8))
        with counted() as counts:
            history = training.fit(loader, epochs=3, validation_data=held_out, verbose=0)
        done = {name: counts[name] for name in ("Execute", "Replay", "MarkStep", "TransferToDevice")}
        return training, (history.history, done)

    plain, expected = fitted(lambda loader: loader)
    wrapped, found = fitted(lambda loader: MpDeviceLoader(loader))
    assert found == expected
    assert found[1]["Execute"] == 3 * (5 + 2)
    assert all(map(torch.equal, plain.model.cpu().parameters(), wrapped.model.cpu().parameters()))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_trainer_on_several_chips(strategy: str) -> None:
    """The strategy places the batches, the last of which the chips do not divide."""

    def losses(wrap: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(3)
        training = xla.Trainer(nn.Linear(4, 2), "sgd", "mse", learning_rate=0.05, strategy=strategy)
        return training.fit(wrap(DataLoader(examples(21), 8)), epochs=2, verbose=0).history["loss"]

    assert losses(MpDeviceLoader) == losses(lambda loader: loader)


def test_a_trainer_evaluates_and_predicts() -> None:
    training = trainer()
    loader = DataLoader(examples(), 8)
    wrapped = MpDeviceLoader(loader)
    assert training.evaluate(wrapped, verbose=0) == training.evaluate(loader, verbose=0)
    assert np.array_equal(training.predict(wrapped, verbose=0), training.predict(loader, verbose=0))


def test_epochs_of_some_batches() -> None:
    """An epoch goes on where the one before has stopped; a limited one starts anew."""

    def losses(wrap: Callable[[Any], Any], **options: Any) -> list[float]:
        training = trainer()
        torch.manual_seed(1)
        return training.fit(wrap(DataLoader(examples(), 8, shuffle=True)), verbose=0, **options).history["loss"]

    for options in ({"epochs": 4, "steps_per_epoch": 2}, {"epochs": 2, "limit_train_batches": 3}):
        assert losses(MpDeviceLoader, **options) == losses(lambda loader: loader, **options)


def test_what_a_trainer_says_of_loaders_behind_it() -> None:
    with pytest.raises(ValueError, match="x is a generator, which can be gone through once, but 2 epochs"):
        trainer().fit(MpDeviceLoader(iter_of(examples())), epochs=2, verbose=0)
    with pytest.raises(ValueError, match=r"x \(cycle\) never ends: say how many batches"):
        trainer().fit(MpDeviceLoader(itertools.cycle([1])), verbose=0)
    loader = MpDeviceLoader(DataLoader(examples(), 8))
    with pytest.raises(RuntimeError, match="another one over the same loader has begun. Wrap the loader twice"):
        trainer().fit(loader, validation_data=loader, epochs=2, steps_per_epoch=2, verbose=0)


def iter_of(dataset: TensorDataset) -> Iterator[Any]:
    yield from DataLoader(dataset, 8)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_test_batch_end", "on_predict_batch_end"])
def test_an_error_in_a_trainer_leaves_no_thread(hook: str) -> None:
    """Though its traceback, which is kept here, holds all that the loop has held."""

    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("in the midst")

    callback = xla.callbacks.LambdaCallback(**{hook: fail})
    loaders = [MpDeviceLoader(DataLoader(examples(), 2)) for _ in range(2)]
    if hook == "on_predict_batch_end":
        with pytest.raises(LookupError, match="in the midst") as caught:
            trainer().predict(loaders[0], callbacks=[callback], verbose=0)
    else:
        with pytest.raises(LookupError, match="in the midst") as caught:
            trainer().fit(loaders[0], validation_data=loaders[1], callbacks=[callback], verbose=0)
    until = time.monotonic() + 1.0
    while any(thread.name.startswith("xlatrainer") for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("xlatrainer")] == []
    assert caught.tb is not None


@pytest.mark.parametrize("stopped", [3, 5, 7])
def test_a_stopped_training_goes_on_exactly(stopped: int, tmp_path: Any) -> None:
    """Shuffled, and with random numbers drawn by the dataset on the loader's thread."""

    class Noisy(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.rand(()), y

    class SaveAt(xla.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            if self.trainer.step == stopped:
                self.trainer.save(tmp_path / "stopped")

    def fitted(seed: int, **options: Any) -> xla.Trainer:
        training = trainer()
        torch.manual_seed(seed)
        loader = MpDeviceLoader(DataLoader(Noisy(*examples().tensors), 8, shuffle=True))
        training.fit(loader, epochs=3, verbose=0, **options)
        return training

    whole = fitted(1, callbacks=[SaveAt()])
    resumed = fitted(77, resume_from=tmp_path / "stopped")
    assert resumed.step == whole.step == 15
    assert all(map(torch.equal, whole.model.cpu().parameters(), resumed.model.cpu().parameters()))
