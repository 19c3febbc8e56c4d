"""`TensorBoard`: event files with scalars, histograms, images, the graph, hyperparameters and profiles."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xlatrainer.backend import counters
from xlatrainer.callbacks.batch_values import BatchValues
from xlatrainer.callbacks.callback import Callback, LogValues
from xlatrainer.callbacks.profiler import StepTrace
from xlatrainer.callbacks.tensorboard_graph import write_graph
from xlatrainer.optional import require
from xlatrainer.storage.mirror import Mirror

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["TensorBoard"]


class TensorBoard(Callback):
    """Writes what TensorBoard shows, with Keras's folders and tags.

    In `LOG_DIR/train` are "epoch_loss" and so on for the values of each epoch, at the epoch's number counted from 0,
    and "batch_loss" and so on, at `trainer.step`; in `LOG_DIR/validation` the values of the validations, under the same
    tags, and "evaluation_loss_vs_iterations" for an `evaluate` of its own. Values are written when they are computed,
    the training does not wait for them.

    Args:
        log_dir: The folder; default "logs". Or a URL that fsspec knows: the files are then written to a temporary
            folder, and sent after each epoch and at the end.
        histogram_freq: Write histograms of all parameters after every so many epochs ("weights/NAME"); default 0,
            never. Each reads all parameters.
        write_graph: An example of the model's inputs (a tensor, or a tuple of tensors) to write its graph with, as
            `torch.export` finds it; default None, no graph.
        write_steps_per_second: True writes "epoch_steps_per_second"; default False.
        update_freq: "epoch" (default), which writes no values of batches, "batch", or a number of steps.
        profile_batch: A step, or the first and the last of several, to be traced by jax's profiler, counted from 1;
            default 0, none.
        histogram_gradients: True writes histograms of the gradients of the epoch's last update too ("gradients/NAME").
            The gradients are then kept from step to step, which takes the memory of the parameters once more. Default
            False.
        images: A function `(trainer, epoch) -> {tag: images}` that is called after each epoch, for tensors of shape
            (channels, height, width) or with the number of images before that, floats from 0 to 1 or uint8. Default
            none.
        hparams: Hyperparameters by name (numbers, strings, booleans), written with the last values of the epochs when
            the training ends; default none.
        write_counters: True writes `xlatrainer.counters` after each epoch, counted from the begin of the `fit`
            ("counters/Execute"). Default False.

    Raises:
        ImportError: If `tensorboard` is not installed.
        ValueError: For a wrong `update_freq`, `histogram_freq` or `profile_batch`.
    """

    writes_files = True
    on_every_process = False

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: Any = None,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        profile_batch: int | tuple[int, int] = 0,
        *,
        histogram_gradients: bool = False,
        images: Callable[[Trainer, int], Mapping[str, Tensor]] | None = None,
        hparams: Mapping[str, Any] | None = None,
        write_counters: bool = False,
    ) -> None:
        if isinstance(write_graph, bool):
            raise TypeError("write_graph takes an example of the model's inputs: a PyTorch model does not know them")
        self.log_dir = log_dir
        self._mirror = Mirror(log_dir)
        self.histogram_freq = _at_least("histogram_freq", histogram_freq, 0)
        self.write_graph = write_graph
        self.write_steps_per_second = write_steps_per_second
        self._batches = BatchValues(update_freq)
        first, last = (profile_batch, profile_batch) if isinstance(profile_batch, int) else profile_batch
        self.profile_batch = (first, last) if first else None
        if self.profile_batch is not None:
            StepTrace(log_dir, first, last)  # raises for a wrong range
        self.histogram_gradients = histogram_gradients
        self.images = images
        self.hparams = None if hparams is None else dict(hparams)
        self.write_counters = write_counters
        self._make_writer = require(
            "torch.utils.tensorboard", "the TensorBoard callback", 'pip install "xlatrainer[tensorboard]"'
        ).SummaryWriter
        self._writers: dict[str, Any] = {}
        self._in_fit = False

    def on_train_begin(self, logs: LogValues) -> None:
        self._batches.begin(self.trainer.step)
        self._counters = counters.snapshot()
        self._latest: dict[str, float] = {}
        self._trace = None if self.profile_batch is None else StepTrace(self._mirror, *self.profile_batch)
        if self.histogram_freq and self.trainer.strategy.process[1] > 1:
            raise ValueError(
                "histogram_freq needs all of each parameter in the process that writes, and several processes train "
                "together: leave it at 0, and look at the weights of a checkpoint"
            )
        if self.histogram_freq and self.histogram_gradients:
            self.trainer.keep_gradients = True
        if self.write_graph is not None:
            write_graph(self._writer("train"), self.model, self.write_graph)
        self._in_fit = True

    def on_epoch_begin(self, epoch: int, logs: LogValues) -> None:
        self._epoch_began = self._trained_until = time.monotonic()
        self._step_before = self.trainer.step

    def on_train_batch_begin(self, batch: int, logs: LogValues) -> None:
        if self._trace is not None:
            self._trace.before_step(self.trainer.step + 1)

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        step = self.trainer.step
        if self._trace is not None:
            self._trace.after_step(step)
        self._batches.add(step, logs)
        self._write_batches(wait=False)
        self._trained_until = time.monotonic()

    def on_test_end(self, logs: LogValues) -> None:
        if not self._in_fit:
            for name, value in logs.items():
                self._writer("validation").add_scalar(f"evaluation_{name}_vs_iterations", value, self.trainer.step)
            self._close()

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        self._write_batches(wait=True)
        train = self._writer("train")
        for name, value in logs.items():
            writer = self._writer("validation") if name.startswith("val_") else train
            writer.add_scalar(f"epoch_{name.removeprefix('val_')}", value, epoch)
        self._latest = dict(logs)
        seconds = self._trained_until - self._epoch_began
        if self.write_steps_per_second and seconds > 0:
            train.add_scalar("epoch_steps_per_second", (self.trainer.step - self._step_before) / seconds, epoch)
        if self.histogram_freq and (epoch + 1) % self.histogram_freq == 0:
            self._write_histograms(epoch)
        if self.images is not None:
            for name, images in self.images(self.trainer, epoch).items():
                add = train.add_image if images.dim() == 3 else train.add_images
                add(name, images.detach().cpu(), epoch)
        if self.write_counters:
            for name, count in counters.snapshot().items():
                train.add_scalar(f"counters/{name}", count - self._counters.get(name, 0), epoch)
        for writer in self._writers.values():
            writer.flush()
        self._mirror.send()

    def on_train_end(self, logs: LogValues) -> None:
        self._in_fit = False
        self._write_batches(wait=True)
        if self._trace is not None:
            self._trace.stop()
        if self.histogram_freq and self.histogram_gradients:
            self.trainer.keep_gradients = False
        if self.hparams is not None and self._latest:
            self._writer("train").add_hparams(
                self.hparams, {f"hparam/{name}": value for name, value in self._latest.items()}, run_name="hparams"
            )
        self._close()

    def on_exception(self, error: BaseException) -> None:
        if not self._in_fit:
            self._close()

    def _writer(self, kind: str) -> Any:
        if kind not in self._writers:
            self._writers[kind] = self._make_writer(str(self._mirror.folder / kind))
        return self._writers[kind]

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._mirror.close()

    def _write_batches(self, wait: bool) -> None:
        """Write the values of batches that are computed; with `wait`, of all."""
        for step, seconds, logs in self._batches.take(wait):
            for name, value in logs.items():
                self._writer("train").add_scalar(f"batch_{name}", value, step, walltime=seconds)

    def _write_histograms(self, epoch: int) -> None:
        named: dict[str, Tensor] = {f"weights/{name}": value for name, value in self.model.named_parameters()}
        if self.histogram_gradients:
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    named[f"gradients/{name}"] = parameter.grad
        fetched = self.trainer.strategy.fetch(list(named.values()))
        for name, values in zip(named, fetched, strict=True):
            values = values.float()
            finite = values[torch.isfinite(values)]
            if finite.numel():
                self._writer("train").add_histogram(name, finite, epoch)
            if finite.numel() < values.numel():
                self._writer("train").add_scalar(f"{name}/not_finite", values.numel() - finite.numel(), epoch)


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value
