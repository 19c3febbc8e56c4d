"""`Trainer`: fit, evaluate and predict with a PyTorch model.

Owns the loops and the order of the hooks, and no more: what a step does is in `steps`, how values are read in `logs`,
where things live in the strategy.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.callback_list import CallbackList
from xlatrainer.callbacks.history import History
from xlatrainer.callbacks.progbar_logger import ProgbarLogger, resolve_verbose
from xlatrainer.data.adapters import rows_as_batches
from xlatrainer.data.batch import split_batch
from xlatrainer.data.epoch_iterator import EpochIterator, grouped
from xlatrainer.metrics.mean import Mean
from xlatrainer.metrics.registry import MetricSpec, resolve_metrics
from xlatrainer.strategies.registry import resolve_strategy
from xlatrainer.strategies.strategy import Strategy
from xlatrainer.trainer.checkpoint import collect_state, read_checkpoint, restore_state, write_checkpoint
from xlatrainer.trainer.logs import Logs
from xlatrainer.trainer.losses import LossSpec, binary_threshold, resolve_loss
from xlatrainer.trainer.modes import evaluating, training
from xlatrainer.trainer.optimizer_state import initialize_state
from xlatrainer.trainer.optimizers import OptimizerSpec, parameter_names, rebind_optimizer, resolve_optimizer
from xlatrainer.trainer.predictions import Predictions
from xlatrainer.trainer.steps import Outcome, eval_step, predict_step, train_step

__all__ = ["Trainer"]

_ROWS_IN_A_PREDICT_BATCH = 32

_T = TypeVar("_T", bound=Callback)


class Trainer:
    """Trains a PyTorch model on the `xla` device, with Keras's methods.

    The model is moved to the strategy's device, in place, when the Trainer is created. Batches are
    `(inputs, targets)`; inputs that are a tuple are the model's positional arguments, a dict its keyword arguments. A
    batch may also be a dict of the arguments of a model that returns a `.loss`.

    Args:
        model: Any module.
        optimizer: A name in any case ("sgd", "adam", "adamw", "rmsprop", ...), a class of `torch.optim`, a function of
            the parameters, or an optimizer of `model`'s parameters, whose param groups and state are kept. Default
            "adamw" with PyTorch's own settings (a learning rate of 0.001, a weight decay of 0.01).
        loss: A name ("cross_entropy", "nll", "mse", "mae", "huber", "smooth_l1", "bce", "bce_with_logits"), or a
            function or module (prediction, target) -> tensor of shape (), the mean over the batch. Default None: the
            `.loss` of the model's output if it has one, cross-entropy for integer targets, mean squared error for float
            targets.
        metrics: Names ("accuracy", "top5_accuracy", "mae", "mse"), functions (prediction, target) -> tensor, or
            `Metric` objects. Default none.
        callbacks: `Callback` objects for every `fit`, `evaluate` and `predict`. Default none.
        strategy: Where to train: a name ("single") or a `Strategy` object. Default "single", one `xla` device.
        learning_rate: The optimizer's `lr`, unless the optimizer is an instance. Default None, the optimizer's own.
        steps_per_execution: Training steps in one program, as in Keras: callbacks see the first batch of each such
            group begin and the last one end. Worth it where a step takes less than a few milliseconds. Default 1.

    Attributes:
        model: The model, on the device.
        optimizer: The optimizer. Its param groups may be changed at any time; a new learning rate compiles nothing.
        epoch: Epochs completed; `step`: updates made; `num_examples`: examples trained on. All are saved and loaded.
        stop_training: Set it to True (from a callback, say) to end `fit` after the current batch.

    Example:
        >>> from xlatrainer.strategies.single import SingleDeviceStrategy
        >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
        >>> batches = list(zip(x.split(16), (2 * x + 1).split(16)))
        >>> trainer = Trainer(nn.Linear(1, 1), "sgd", learning_rate=0.1, strategy=SingleDeviceStrategy("cpu"))
        >>> history = trainer.fit(batches, epochs=50, verbose=0)
        >>> history.history["loss"][-1] < 1e-3
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSpec = "adamw",
        loss: LossSpec = None,
        metrics: Sequence[MetricSpec] = (),
        callbacks: Sequence[Callback] = (),
        strategy: str | Strategy = "single",
        *,
        learning_rate: float | None = None,
        steps_per_execution: int = 1,
    ) -> None:
        if steps_per_execution < 1:
            raise ValueError(f"steps_per_execution must be at least 1, got {steps_per_execution}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module object, got {model!r}")
        if isinstance(optimizer, Optimizer) and learning_rate is not None:
            raise ValueError("learning_rate is for an optimizer given by name, class or function; this one has its own")
        self._loss_function = resolve_loss(loss)
        self._metrics = resolve_metrics(metrics, threshold=binary_threshold(loss))
        self.strategy = resolve_strategy(strategy)
        names = parameter_names(model)
        self.model = self.strategy.setup(model)
        self.optimizer = (
            rebind_optimizer(optimizer, names, self.model)
            if isinstance(optimizer, Optimizer)
            else resolve_optimizer(optimizer, self.model.parameters(), learning_rate)
        )
        if isinstance(loss, nn.Module):
            loss.to(self.strategy.device)
        self._loss_mean = Mean("loss")
        for metric in [self._loss_mean, *self._metrics]:
            metric.to(self.strategy.device)
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "loss": self._loss_function,
            "metrics": [self._loss_mean, *self._metrics],
        }
        self._training = self.strategy.compiled(self._record_training, state, "the training step")
        self._testing = self.strategy.compiled(self._record_test, state, "the evaluation step")
        self.steps_per_execution = steps_per_execution
        self.callbacks = list(callbacks)
        self.epoch = 0
        self.step = 0
        self.num_examples = 0
        self.stop_training = False

    def fit(
        self,
        data: Iterable[Any],
        epochs: int = 1,
        *,
        validation_data: Iterable[Any] | None = None,
        callbacks: Sequence[Callback] = (),
        verbose: str | int = "auto",
        initial_epoch: int = 0,
    ) -> History:
        """Train for some epochs.

        Each batch is one program on the device: forward, backward, update and metrics. It is compiled when a batch of
        a new shape comes first. Once two batches in a row have done the same, the model's Python runs no more as long
        as nothing that it can reach changes: see `xlatrainer.compile`. **A last batch that is shorter is a shape of its
        own: one more program, compiled in the first epoch only**, and it counts by its number of examples, so that the
        epoch's loss and metrics are those of all examples.

        Args:
            data: A DataLoader, a list of batches, or any other iterable of batches, gone through once an epoch. An
                iterator that cannot start anew (a generator) does for one epoch.
            epochs: The number of the last epoch, as in Keras: `epochs - initial_epoch` are trained. Default 1.
            validation_data: Batches to evaluate after each epoch; their values get `val_` names. Default None.
            callbacks: Further callbacks, for this call.
            verbose: 0 silent, 1 a progress bar, 2 one line an epoch. Default "auto": 1 in a terminal, otherwise 2.
            initial_epoch: Epochs to leave out, for a training that goes on: `trainer.epoch` after a `load`. Default 0.

        Returns:
            The `History`: `history.history["loss"]` has one value an epoch, each weighted by examples.

        Raises:
            TypeError: If `data` does not yield batches, or a batch is not (inputs, targets).
            ValueError: If there is no batch to train on, or no default loss fits.
        """
        if epochs < 1 or initial_epoch < 0:
            raise ValueError(
                f"epochs must be at least 1 and initial_epoch at least 0, got {epochs} and {initial_epoch}"
            )
        num_epochs = epochs - initial_epoch
        batches = EpochIterator(data, argument="data", epochs=num_epochs)
        validation = None
        if validation_data is not None:
            validation = EpochIterator(validation_data, argument="validation_data", epochs=num_epochs)
        history = _find(History, [*self.callbacks, *callbacks])
        if history is None:
            history = History()
            callbacks = [*callbacks, history]
        hooks = self._hooks(callbacks, verbose, epochs, batches)
        initialize_state(self.optimizer)
        self.strategy.end_step()
        self.stop_training = False
        logs = Logs({}, self.strategy)
        hooks.call("on_train_begin")
        with self.strategy.loop(), training(self.model):
            for epoch in range(initial_epoch, epochs):
                hooks.call("on_epoch_begin", epoch)
                logs = self._train_epoch(batches, hooks)
                if validation is not None:
                    logs = logs.with_validation(self._evaluate(validation, hooks))
                self.epoch = epoch + 1
                hooks.call("on_epoch_end", epoch, logs=logs)
                if self.stop_training:
                    break
        hooks.call("on_train_end", logs=logs)
        return history

    def evaluate(
        self, data: Iterable[Any], *, callbacks: Sequence[Callback] = (), verbose: str | int = "auto"
    ) -> dict[str, float]:
        """The loss and the metrics over `data`, in eval mode.

        Args:
            data: As for `fit`.
            callbacks: Further callbacks, for this call.
            verbose: As for `fit`.

        Returns:
            The values by name: "loss" and the metrics, over all examples alike.
        """
        batches = EpochIterator(data)
        hooks = self._hooks(callbacks, verbose, 1, batches)
        self.strategy.end_step()
        return dict(self._evaluate(batches, hooks))

    def predict(
        self,
        data: Iterable[Any] | Tensor | np.ndarray[Any, Any],
        *,
        batch_size: int | None = None,
        callbacks: Sequence[Callback] = (),
        verbose: str | int = "auto",
    ) -> Any:
        """The model's outputs for `data`, in eval mode and without gradients.

        Args:
            data: A tensor or array of inputs, shape (rows, ...), or batches as for `fit`; these may be of inputs alone
                if those are tensors or dicts. Targets are left unused.
            batch_size: Rows a batch, only for a tensor or array. Default None, which means 32.
            callbacks: Further callbacks, for this call.
            verbose: As for `fit`.

        Returns:
            The outputs on the CPU, those of all batches concatenated in order; the `.logits` of outputs that have them.
            Tuples, lists and dicts of tensors keep their structure.

        Raises:
            ValueError: If `batch_size` is given with batches.
        """
        if isinstance(data, Tensor | np.ndarray):
            rows = rows_as_batches(data, _ROWS_IN_A_PREDICT_BATCH if batch_size is None else batch_size)
            batches = EpochIterator(list(rows))
        elif batch_size is not None:
            raise ValueError("batch_size is for a tensor or array; the data given comes in batches already")
        else:
            batches = EpochIterator(data)
        hooks = self._hooks(callbacks, verbose, 1, batches)
        predictions = Predictions(self.strategy)
        self.strategy.end_step()
        hooks.call("on_predict_begin")
        with self.strategy.loop(), evaluating(self.model), torch.no_grad():
            for index, batch in batches:
                hooks.call("on_predict_batch_begin", index)
                inputs = split_batch(batch).inputs
                output = predict_step(self.model, self.strategy.to_device(inputs))
                self.strategy.end_step()
                predictions.add(output)
                hooks.call("on_predict_batch_end", index)
        hooks.call("on_predict_end")
        return predictions.concatenated()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the whole state: model, optimizer, and the counters `epoch`, `step` and `num_examples`.

        The file appears whole or not at all, also when the process is killed while it is written; an older file at
        `path` is replaced only by a whole one. `torch.load(path, weights_only=True)["model"]` is the state dict.

        Args:
            path: The file, in an existing folder.

        Raises:
            TypeError: If a state holds something that could not be loaded without executing code.
        """
        counters = {"epoch": self.epoch, "step": self.step, "num_examples": self.num_examples}
        write_checkpoint(collect_state(self.model, self.optimizer, counters, self.strategy), path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load what `save` wrote, on any device; `fit(..., initial_epoch=trainer.epoch)` then goes on training.

        No code in the file is executed.

        Args:
            path: The file.

        Raises:
            ValueError: If the file was not written by `save`, or with another optimizer class.
            RuntimeError: If it does not fit the model.
        """
        counters = restore_state(read_checkpoint(path), self.model, self.optimizer)
        self.strategy.end_step()
        self.epoch, self.step, self.num_examples = (counters[name] for name in ("epoch", "step", "num_examples"))

    def _train_epoch(self, batches: EpochIterator, hooks: CallbackList) -> Logs:
        self._reset_metrics()
        logs = Logs({}, self.strategy)
        for group in grouped(batches, self.steps_per_execution):
            hooks.call("on_train_batch_begin", group[0][0])
            logs = self._train_batches([batch for _, batch in group])
            hooks.call("on_train_batch_end", group[-1][0], logs=logs)
            if self.stop_training:
                break
        return logs

    def _evaluate(self, batches: EpochIterator, hooks: CallbackList) -> Logs:
        self._reset_metrics()
        logs = Logs({}, self.strategy)
        hooks.call("on_test_begin")
        with self.strategy.loop(), evaluating(self.model), torch.no_grad():
            for index, batch in batches:
                hooks.call("on_test_batch_begin", index)
                logs = self._test_batch(batch)
                hooks.call("on_test_batch_end", index, logs=logs)
        hooks.call("on_test_end", logs=logs)
        return logs

    # What a step computes and nobody needs (a prediction, the graph of the loss) must be gone when it ends, or it would
    # be an output of its program: each step is recorded in a function of its own.

    def _train_batches(self, batches: list[Any]) -> Logs:
        placed = [(self.strategy.to_device(batch),) for batch in batches]
        results = [self._training(*placed[0])] if len(placed) == 1 else self._training.many(placed)
        self.step += len(results)
        self.num_examples += sum(num_examples for _, num_examples in results)
        return Logs(results[-1][0], self.strategy)

    def _record_training(self, batch: Any) -> tuple[dict[str, Tensor], int]:
        outcome = train_step(self.model, self.optimizer, self._loss_function, batch)
        return self._record_metrics(outcome), outcome.num_examples

    def _test_batch(self, batch: Any) -> Logs:
        return Logs(self._testing(self.strategy.to_device(batch)), self.strategy)

    def _record_test(self, batch: Any) -> dict[str, Tensor]:
        return self._record_metrics(eval_step(self.model, self._loss_function, batch))

    @torch.no_grad()
    def _record_metrics(self, outcome: Outcome) -> dict[str, Tensor]:
        self._loss_mean.update(outcome.loss, outcome.num_examples)
        for metric in self._metrics:
            metric.update(outcome.prediction, outcome.target)
        return {metric.name: metric.compute() for metric in [self._loss_mean, *self._metrics]}

    def _reset_metrics(self) -> None:
        for metric in [self._loss_mean, *self._metrics]:
            metric.reset()

    def _hooks(
        self, callbacks: Sequence[Callback], verbose: str | int, epochs: int, batches: EpochIterator
    ) -> CallbackList:
        """The callbacks of a call: the Trainer's, the call's own, and the progress display if it is not silent."""
        level = resolve_verbose(verbose)
        given = [*self.callbacks, *callbacks]
        if level and not _find(ProgbarLogger, given):
            given.append(ProgbarLogger())
        return CallbackList(given, self, {"epochs": epochs, "steps": batches.num_batches, "verbose": level})


def _find(kind: type[_T], callbacks: Sequence[Callback]) -> _T | None:
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)
