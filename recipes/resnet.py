"""Train a ResNet, or another network of torchvision, on ImageNet: PyTorch on the `xla` device.

Flags and their defaults are those of PyTorch/XLA's ImageNet script, without those for several devices. `--datadir` is a
folder with "train" and "val", each with a folder of images for each class, or with TFRecord files; it may be a URL.

    python recipes/resnet.py --fake_data --batch_size=256 --num_epochs=1
    python recipes/resnet.py --fake_data --model=resnet18 --image_size=64 --batch_size=16 --num_steps=10 --num_epochs=1
    python recipes/resnet.py --datadir=imagenet --drop_last --lr=0.4 --num_warmup_epochs=5 --num_epochs=100 \
        --lr_scheduler_divide_every_n_epochs=30 --lr_scheduler_divisor=10 --eval_interval=10
"""

import argparse
import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import xlatrainer as xla
from xlatrainer.data.images import image_datasets

BELOW_TARGET = 21  # the exit status when the accuracy is below --target_accuracy
NUM_CLASSES = 1000
FAKE_IMAGES, FAKE_TEST_IMAGES = 1_281_167, 50_000  # as many as ImageNet has; they cost nothing to make
WARMUP = "WarmupAndExponentialDecayScheduler"


class TrainingLines(xla.callbacks.Callback):
    """Prints a line every so many steps: loss, images a second since the last line and since the epoch began."""

    def __init__(self, log_steps: int, batch_size: int) -> None:
        self.log_steps = log_steps
        self.batch_size = batch_size

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float]) -> None:
        self.epoch = epoch + 1
        self.began = self.last = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        if batch % self.log_steps:
            return
        loss = logs["loss"]  # waits for the step
        now, steps = time.perf_counter(), min(batch + 1, self.log_steps)
        rate, global_rate = (
            steps * self.batch_size / (now - self.last),
            (batch + 1) * self.batch_size / (now - self.began),
        )
        self.last = now
        print(
            f"| Training Device={xla.device()}/0 Epoch={self.epoch} Step={batch} Loss={loss:.5f} Rate={rate:.2f} "
            f"GlobalRate={global_rate:.2f} Time={time.strftime('%H:%M:%S')}",
            flush=True,
        )


def warmup_and_decay(
    steps_per_epoch: int, num_warmup_epochs: float, divide_every_n_epochs: int, divisor: float
) -> Callable[[int], float]:
    """The share of the learning rate at a step: rising to 1 over the warm-up, then divided every n epochs."""
    warmup_steps = round(num_warmup_epochs * steps_per_epoch)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return divisor ** -(step // steps_per_epoch // divide_every_n_epochs)

    return factor


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a network of torchvision on ImageNet through XLA.")
    parser.add_argument("--datadir", default="imagenet", help="folder or URL of the images (default: imagenet)")
    parser.add_argument("--logdir", help="folder for scalars.csv and TensorBoard's files (default: none written)")
    parser.add_argument("--model", default="resnet50", help="a classifier of torchvision.models (default: resnet50)")
    parser.add_argument("--image_size", type=int, default=224, help="pixels of a side (default: 224)")
    parser.add_argument("--batch_size", type=int, default=128, help="training images in a batch (default: 128)")
    parser.add_argument("--test_set_batch_size", type=int, default=64, help="test images in a batch (default: 64)")
    parser.add_argument("--num_epochs", type=int, default=18, help="passes over the training images (default: 18)")
    parser.add_argument(
        "--num_steps", type=int, help="at most so many batches in an epoch and in a test (default: all)"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD (default: 0.9)")
    parser.add_argument("--target_accuracy", type=float, default=0.0, help="in percent; below it the status is 21")
    parser.add_argument(
        "--lr_scheduler_type", choices=[WARMUP], help="default: none, unless one of its numbers below is given"
    )
    parser.add_argument("--lr_scheduler_divide_every_n_epochs", type=int, help="default: 20")
    parser.add_argument("--lr_scheduler_divisor", type=float, help="default: 5")
    parser.add_argument("--num_warmup_epochs", type=float, help="default: 0.9")
    parser.add_argument("--eval_interval", type=int, default=1, help="epochs from one test to the next (default: 1)")
    parser.add_argument("--test_only_at_end", action="store_true", help="test after the last epoch only")
    parser.add_argument("--log_steps", type=int, default=20, help="steps from one line to the next (default: 20)")
    parser.add_argument("--num_workers", type=int, default=8, help="processes that load images (default: 8)")
    parser.add_argument("--persistent_workers", action="store_true", help="keep these processes between epochs")
    parser.add_argument("--prefetch_factor", type=int, default=16, help="batches ahead of each of these (default: 16)")
    parser.add_argument("--loader_prefetch_size", type=int, default=8, help="batches ahead on the host (default: 8)")
    parser.add_argument("--device_prefetch_size", type=int, default=4, help="batches ahead on the device (default: 4)")
    parser.add_argument("--host_to_device_transfer_threads", type=int, default=1, help="default: 1")
    parser.add_argument("--use_gradient_checkpointing", action="store_true", help="compute residual blocks twice")
    parser.add_argument(
        "--strategy",
        choices=("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "auto"),
        default="single",
        help="one device, or what each of several has, see docs/sharding.md (default: single)",
    )
    parser.add_argument("--ddp", dest="strategy", action="store_const", const="ddp", help="the same as --strategy ddp")
    parser.add_argument("--drop_last", action="store_true", help="leave out a last batch that is short")
    parser.add_argument("--fake_data", action="store_true", help="noise instead of images: nothing is learnt")
    parser.add_argument("--tidy", action="store_true", help="remove --logdir at the end")
    parser.add_argument("--metrics_debug", action="store_true", help="print the report of metrics at the end")
    parser.add_argument("--profile", action="store_true", help="let a profiler connect while it trains")
    parser.add_argument("--profiler_port", type=int, default=9012, help="where it connects (default: 9012)")
    parser.add_argument("--seed", type=int, default=42, help="of the weights and the order of images (default: 42)")
    return parser.parse_args(arguments)


def make_model(name: str, num_classes: int) -> nn.Module:
    if importlib.util.find_spec("torchvision") is None:
        raise SystemExit("this recipe needs torchvision: pip install 'xlatrainer[vision]'")
    from torchvision import models

    if name not in models.list_models(module=models):
        raise SystemExit(
            f"--model={name} is no classifier of torchvision; there are {', '.join(models.list_models(models))}"
        )
    model: nn.Module = models.get_model(name, num_classes=num_classes)
    return model


def make_data(options: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any], int]:
    """Training and test images, and the number of classes."""
    if not options.fake_data:
        return image_datasets(options.datadir, options.image_size)
    shape = (3, options.image_size, options.image_size)
    train, test = (
        xla.data.FakeImages(shape, NUM_CLASSES, count=count, seed=options.seed)
        for count in (FAKE_IMAGES, FAKE_TEST_IMAGES)
    )
    return train, test, NUM_CLASSES


def make_loader(dataset: Dataset[Any], batch_size: int, train: bool, options: argparse.Namespace) -> Any:
    workers = 0 if options.fake_data else options.num_workers
    for_workers = {"persistent_workers": options.persistent_workers, "prefetch_factor": options.prefetch_factor}
    loader = DataLoader(
        dataset,
        batch_size,
        shuffle=train,
        drop_last=train and options.drop_last,
        num_workers=workers,
        generator=torch.Generator().manual_seed(options.seed),
        **(for_workers if workers else {}),
    )
    return xla.data.MpDeviceLoader(
        loader,
        xla.device(),
        loader_prefetch_size=options.loader_prefetch_size,
        device_prefetch_size=options.device_prefetch_size,
        host_to_device_transfer_threads=options.host_to_device_transfer_threads,
    )


def make_schedule(options: argparse.Namespace, steps_per_epoch: int) -> Callable[[Any], LambdaLR] | None:
    numbers = (options.num_warmup_epochs, options.lr_scheduler_divide_every_n_epochs, options.lr_scheduler_divisor)
    if options.lr_scheduler_type is None and all(number is None for number in numbers):
        return None
    warmup, every, divisor = (
        d if number is None else number for number, d in zip(numbers, (0.9, 20, 5.0), strict=True)
    )
    factor = warmup_and_decay(steps_per_epoch, warmup, int(every), divisor)
    return lambda optimizer: LambdaLR(optimizer, factor)


def blocks_of(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of the model's residual blocks, whose activations need most of the memory."""
    from torchvision.models import resnet

    found = {type(module) for module in model.modules()} & {resnet.BasicBlock, resnet.Bottleneck}
    if not found:
        raise SystemExit("--use_gradient_checkpointing is for ResNets: there are no residual blocks in this model")
    return sorted(found, key=lambda block: block.__name__)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train and test; returns the best test accuracy in percent, NaN without a test."""
    options = parse_arguments(arguments)
    torch.manual_seed(options.seed)
    xla.manual_seed(options.seed)
    if options.profile:
        xla.profiler.start_server(options.profiler_port)
    train, test, num_classes = make_data(options)
    model = make_model(options.model, num_classes)
    train_batches = make_loader(train, options.batch_size, True, options)
    test_batches = make_loader(test, options.test_set_batch_size, False, options)
    steps_per_epoch = min(len(train_batches), options.num_steps or len(train_batches))

    callbacks: list[xla.callbacks.Callback] = [TrainingLines(options.log_steps, options.batch_size)]
    if options.logdir:
        callbacks += [
            xla.callbacks.CSVLogger(f"{options.logdir}/scalars.csv"),
            xla.callbacks.TensorBoard(options.logdir),
        ]
    trainer = xla.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum, weight_decay=1e-4),
        loss="cross_entropy",
        metrics=["accuracy"],
        callbacks=callbacks,
        scheduler=make_schedule(options, steps_per_epoch),
        scheduler_interval="step",
        strategy=options.strategy,
        gradient_checkpointing=blocks_of(model) if options.use_gradient_checkpointing else (),
    )
    history = trainer.fit(
        train_batches,
        epochs=options.num_epochs,
        validation_data=test_batches,
        validation_freq=[options.num_epochs] if options.test_only_at_end else options.eval_interval,
        limit_train_batches=options.num_steps,
        limit_val_batches=options.num_steps,
        verbose=2,
    )
    tested = history.history.get("val_accuracy", [])
    accuracy = 100 * max(tested, default=0.0)
    print(f"Max Accuracy: {accuracy:.2f}%" if tested else "no test was made: --eval_interval is beyond --num_epochs")
    if options.metrics_debug:
        print(xla.debug.metrics_report())
    if options.tidy and options.logdir:
        shutil.rmtree(options.logdir)
    if tested and accuracy < options.target_accuracy:
        print(f"the accuracy is below the target of {options.target_accuracy}%")
        sys.exit(BELOW_TARGET)
    return accuracy if tested else float("nan")


if __name__ == "__main__":
    main()
