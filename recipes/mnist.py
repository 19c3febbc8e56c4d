"""Train a small convolutional network on handwritten digits: PyTorch on the `xla` device.

The network is the one of PyTorch/XLA's MNIST example. Ten thousand digits (8,000 to train, 2,000 to test) lie next to
this file; `--download` fetches all 70,000. The same seed gives the same accuracy.

    python recipes/mnist.py
    python recipes/mnist.py --epochs 10 --batch-size 256 --logdir runs/mnist --device-report
    CPU_NUM_DEVICES=4 python recipes/mnist.py --strategy fsdp
"""

import argparse
import gzip
import importlib.util
import statistics
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import xlatrainer as xla
from xlatrainer.distributed.processes import is_first

SHIPPED_DIGITS = Path(__file__).parent / "data" / "mnist"
STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "auto")
MEAN, STANDARD_DEVIATION = 0.1307, 0.3081  # of the training set's pixels


class MNISTNet(nn.Module):
    """Two convolutions, two linear layers: images (N, 1, 28, 28) to log-probabilities (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.bn1 = nn.BatchNorm2d(10)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.bn2 = nn.BatchNorm2d(20)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 28, 28), normalized float32, and their labels (N,), int64."""

    images: Tensor
    labels: Tensor


class Batches:
    """The digits in batches, an epoch at a time: whole tensors cut by index, which costs next to nothing.

    With a `generator` each epoch has a new order, the same for the same seed. The last batch may be short.
    """

    def __init__(self, digits: Digits, batch_size: int, generator: torch.Generator | None = None) -> None:
        self.digits = digits
        self.batch_size = batch_size
        self.generator = generator

    def __len__(self) -> int:
        return -(-len(self.digits.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.digits.labels)
        order = torch.arange(count) if self.generator is None else torch.randperm(count, generator=self.generator)
        for rows in order.split(self.batch_size):
            yield self.digits.images[rows], self.digits.labels[rows]


class Throughput(xla.callbacks.Callback):
    """Examples trained a second, by epoch: from the first batch until the values of the last one are there."""

    def __init__(self) -> None:
        self.by_epoch: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float]) -> None:
        self._start = time.perf_counter()
        self._examples_before = self.trainer.num_examples
        self._measured = False

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        self._last_logs = logs  # not read here: that would stop the device after every batch

    def on_test_begin(self, logs: Mapping[str, float]) -> None:
        self._last_logs["loss"]  # waits for the last batch
        seconds = time.perf_counter() - self._start
        self.by_epoch.append((self.trainer.num_examples - self._examples_before) / seconds)


def read_idx(path: Path) -> Tensor:
    """The bytes of a gzipped IDX file as a uint8 tensor of the shape that the file states."""
    content = gzip.decompress(path.read_bytes())
    num_dims = content[3]
    shape = struct.unpack(f">{num_dims}I", content[4 : 4 + 4 * num_dims])
    return torch.frombuffer(bytearray(content[4 + 4 * num_dims :]), dtype=torch.uint8).reshape(shape)


def as_digits(pixels: Tensor, labels: Tensor) -> Digits:
    """Digits from pixels (N, 28, 28) of 0 to 255 and labels (N,)."""
    images = (pixels.float() / 255 - MEAN) / STANDARD_DEVIATION
    return Digits(images.unsqueeze(1), labels.long())


def shipped_digits() -> tuple[Digits, Digits]:
    """8,000 digits to train and 2,000 to test."""
    train, test = (
        as_digits(
            read_idx(SHIPPED_DIGITS / f"{part}-images-idx3-ubyte.gz"),
            read_idx(SHIPPED_DIGITS / f"{part}-labels-idx1-ubyte.gz"),
        )
        for part in ("train", "t10k")
    )
    return train, test


def downloaded_digits(folder: str) -> tuple[Digits, Digits]:
    """All of MNIST, 60,000 and 10,000, from torchvision's mirrors; kept in `folder`."""
    if importlib.util.find_spec("torchvision") is None:
        raise SystemExit("--download needs torchvision: pip install 'xlatrainer[vision]', or pip install torchvision")
    from torchvision.datasets import MNIST

    parts = [MNIST(folder, train=train, download=True) for train in (True, False)]
    train, test = (as_digits(part.data, part.targets) for part in parts)
    return train, test


def fake_digits(num_train: int = 2048, num_test: int = 512) -> tuple[Digits, Digits]:
    """Random pixels and labels: nothing to learn, but the same work."""
    generator = torch.Generator().manual_seed(0)
    train, test = (
        as_digits(
            torch.randint(0, 256, (count, 28, 28), generator=generator),
            torch.randint(0, 10, (count,), generator=generator),
        )
        for count in (num_train, num_test)
    )
    return train, test


def cached_batches(digits: Digits, folder: str, batch_size: int, shuffle: bool = False) -> xla.data.MpDeviceLoader:
    """The digits one by one, out of a cache that is filled first, in batches that threads put together ahead.

    As with a dataset whose examples are slow to make; these are not, so that this is slower than `Batches`.
    """
    dataset = xla.data.CachedDataset(TensorDataset(digits.images, digits.labels), folder)
    dataset.warmup()
    return xla.data.MpDeviceLoader(DataLoader(dataset, batch_size, shuffle=shuffle))


def say(text: str) -> None:
    """Print, once where there are several processes."""
    if is_first():
        print(text, flush=True)


def print_summary(model: nn.Module) -> None:
    """The layers of `model` and their numbers of parameters."""
    for name, layer in model.named_children():
        say(f"  {name:<8}{sum(p.numel() for p in layer.parameters()):>8,}  {layer}")
    say(f"  {'total':<8}{sum(p.numel() for p in model.parameters()):>8,}  parameters")


def print_device_report() -> None:
    """The devices and what they did."""
    say(f"devices: {xla.devices()}, real devices: {xla.real_devices()}")
    for name, count in sorted(xla.counters.snapshot().items()):
        say(f"  {name:<24}{count:>8,}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on MNIST through XLA.")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training digits (default: 5)")
    parser.add_argument("--batch-size", type=int, default=128, help="digits in a batch (default: 128)")
    parser.add_argument(
        "--lr",
        type=float,
        default=0.1,
        help="learning rate of the first epoch, falling towards 0 (default: 0.1)",
    )
    parser.add_argument("--seed", type=int, default=42, help="of the weights and the order of batches (default: 42)")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="single",
        help="one device, or what each of several has, see docs/sharding.md (default: single)",
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--download", action="store_true", help="all 70,000 digits, through torchvision")
    data.add_argument("--fake-data", action="store_true", help="random images: no file is read, nothing is learnt")
    parser.add_argument("--datadir", default="runs/mnist-data", help="where --download keeps the digits")
    parser.add_argument(
        "--dscache-dir", "--dscache_dir", help="a folder or URL to cache the examples in, one by one (default: none)"
    )
    parser.add_argument("--logdir", help="folder for scalars.csv: loss and accuracy by epoch (default: none written)")
    parser.add_argument("--device-report", action="store_true", help="print the devices and counters at the end")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train and test; returns the test accuracy, between 0 and 1."""
    options = parse_arguments(arguments)
    if options.download:
        train, test = downloaded_digits(options.datadir)
    else:
        train, test = fake_digits() if options.fake_data else shipped_digits()

    torch.manual_seed(options.seed)
    xla.manual_seed(options.seed)
    train_batches: Iterable[object]
    test_batches: Iterable[object]
    if options.dscache_dir:
        train_batches = cached_batches(train, f"{options.dscache_dir}/train", options.batch_size, shuffle=True)
        test_batches = cached_batches(test, f"{options.dscache_dir}/test", options.batch_size)
    else:
        train_batches = Batches(train, options.batch_size, torch.Generator().manual_seed(options.seed))
        test_batches = Batches(test, options.batch_size)

    model = MNISTNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    throughput = Throughput()
    callbacks: list[xla.callbacks.Callback] = [throughput]
    if options.logdir:
        callbacks.append(xla.callbacks.CSVLogger(Path(options.logdir) / "scalars.csv"))
    trainer = xla.Trainer(
        model, optimizer, loss="nll", metrics=["accuracy"], callbacks=callbacks, strategy=options.strategy
    )

    def lower_learning_rate(epoch: int, logs: Mapping[str, float]) -> None:
        for group in optimizer.param_groups:
            group["lr"] = options.lr * (1 - epoch / options.epochs)  # a new value, not a new program

    say(f"MNISTNet on {xla.device()}, {len(train.labels):,} digits to train, {len(test.labels):,} to test")
    print_summary(model)
    if options.strategy != "single":
        say(f"{type(trainer.strategy).__name__}, {len(xla.real_devices())} devices")
    history = trainer.fit(
        train_batches,
        epochs=options.epochs,
        validation_data=test_batches,
        callbacks=[xla.callbacks.LambdaCallback(on_epoch_begin=lower_learning_rate)],
    )

    if options.device_report:
        print_device_report()
    steady = throughput.by_epoch[1:] or throughput.by_epoch  # the first epoch compiles
    say(f"examples/s: {statistics.median(steady):,.0f}")
    say(f"compilations: {xla.counters.value('UncachedCompile')}")
    accuracy = history.history["val_accuracy"][-1]
    say(f"test accuracy: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
