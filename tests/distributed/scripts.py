"""What the processes of tests do: functions that a started process can import."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import xlatrainer as xla
from tests.strategies.models import PLANS, Losses, batches, model_of
from xlatrainer import config
from xlatrainer.callbacks.callback import Callback
from xlatrainer.distributed import Mesh, launch
from xlatrainer.distributed.processes import barrier, from_first, process_count, process_index
from xlatrainer.strategies import DDPStrategy, MeshStrategy, Strategy
from xlatrainer.trainer.trainer import Trainer


def on_devices(index: int, number: int, function: Callable[..., None], *args: Any) -> None:
    """Call a function in a process that has so many devices; the environment is that of the server it came from."""
    config.put(cpu_devices=number)
    function(index, *args)


def examples(kind: str) -> TensorDataset:
    """43 rows, which no number of devices divides; of the CNN 48, since padding rows count in its batch norm."""
    data = batches(kind, 3)
    rows = 48 if kind == "cnn" else 43
    return TensorDataset(*[torch.cat(parts)[:rows] for parts in zip(*data, strict=True)])


def strategy_named(name: str, kind: str) -> str | Strategy:
    if name == "tensor_parallel":  # each process has a row of it
        return MeshStrategy(Mesh(range(4), (2, 2), ("data", "model")), PLANS[kind])
    return name


def train(index: int, kind: str, strategy: str, folder: str) -> None:
    """Train on a shuffled loader, evaluate and predict; writes what came out."""
    torch.manual_seed(3 + index)  # the first process's is everybody's
    xla.manual_seed(7 + index)
    dataset = examples(kind)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    losses = Losses()
    where = strategy_named(strategy, kind)
    trainer = Trainer(model_of(kind), "adamw", "cross_entropy", ["accuracy"], [losses], where, learning_rate=1e-3)
    history = trainer.fit(loader, epochs=7, verbose=2)
    evaluated = trainer.evaluate(batches(kind, 2) * 40, verbose=0)  # more than may be in flight
    predicted = trainer.predict(dataset.tensors[0][:21], batch_size=8, verbose=0)
    from_loader = trainer.predict(DataLoader(dataset, batch_size=8), verbose=0)
    assert torch.allclose(from_loader[:21], predicted, atol=1e-5)
    assert len(from_loader) == len(dataset)
    result = {
        "losses": losses.seen,
        "accuracy": history.history["accuracy"],
        "examples": trainer.num_examples,
        "evaluated": evaluated,
        "predicted": predicted.flatten(1).sum(1).tolist(),
        "devices": xla.real_devices(),
    }
    Path(folder, f"{strategy}-{index}.json").write_text(json.dumps(result), encoding="utf-8")


class Die(Callback):
    """Ends its process by a signal after some batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def die(index: int) -> None:
    """Train until process 1 dies."""
    trainer = Trainer(torch.nn.Linear(4, 4), "sgd", "mse", strategy="ddp", callbacks=[Die()] if index == 1 else [])
    data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(100)]
    trainer.fit(data, epochs=1000, verbose=0)


def interrupted(index: int, folder: str) -> None:
    """Process 1 is asked to end; both do so after the same step."""

    class Ask(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(torch.nn.Linear(4, 4), "sgd", "mse", strategy="ddp", callbacks=[Ask()] if index == 1 else [])
    data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(100)]
    try:
        trainer.fit(data, epochs=10, verbose=0)
    except SystemExit as end:
        Path(folder, str(index)).write_text(f"{end.code} {trainer.step}", encoding="utf-8")


def fail(index: int) -> None:
    """Process 1 raises, while process 0 waits."""
    if index == 1:
        raise ValueError("the second one cannot")
    time.sleep(600)  # it is ended long before; so long only if that should fail


def fail_together(index: int) -> None:
    """Process 1 raises once both are joined, while process 0 waits."""
    barrier("all are there")
    fail(index)


def fall_silent(index: int) -> None:
    """Process 1 is stopped, so that it gives no sign of life; process 0 waits for it."""
    os.environ["XLATRAINER_HEARTBEAT_SECONDS"] = "1"
    barrier("all are there")
    if index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)  # it is ended long before; so long only if that should fail


def talk(index: int, folder: str) -> None:
    """What processes say to each other."""
    barrier("all are there")
    sent = from_first(torch.tensor([1.5, 2.5]) + index).tolist()
    said = [process_index(), process_count(), DDPStrategy().strongest(index), sent]
    Path(folder, f"talk-{index}.json").write_text(json.dumps([index, said]), encoding="utf-8")


if __name__ == "__main__":
    launch(talk, (os.environ["FOLDER"],))
