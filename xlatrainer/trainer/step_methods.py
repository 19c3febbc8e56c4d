"""What the Trainer does beside its loops: the steps that a subclass overrides, single calls of them, its numbers."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.data.batch import plain_batch
from xlatrainer.strategies.strategy import Strategy
from xlatrainer.trainer.ema import EMA
from xlatrainer.trainer.logs import Logs
from xlatrainer.trainer.modes import evaluating, training
from xlatrainer.trainer.stepper import Stepper
from xlatrainer.trainer.steps import model_step, predict_step
from xlatrainer.trainer.summary import Summary, summarize

__all__ = ["StepMethods"]


class StepMethods(ABC):
    """The part of `Trainer` that is about single batches, the model and the numbers of a training."""

    model: nn.Module
    strategy: Strategy
    stepper: Stepper
    optimizers: dict[str, Optimizer]
    ema: EMA | None
    _counters: dict[str, int]

    def training_step(self, batch: Any) -> Any:
        """A batch's loss, from which `fit` makes an update; the model's own `training_step` if it has one.

        Override it here, or define `training_step(self, batch)` or `(self, batch, trainer)` in the model, to train in
        another way. It is recorded as a part of one program and then runs no more: it must not read a value.

        Args:
            batch: On the device.

        Returns:
            One of: a loss of shape (); a dict with "loss", with "prediction" and "target" if there are metrics, and
            with further values of shape () to log; the model's output, if it has a `.loss`; None, if the step has made
            its updates itself (`minimize`).

        Example:
            >>> from xlatrainer.trainer.trainer import Trainer
            >>> class Distance(Trainer):
            ...     def training_step(self, batch):
            ...         inputs, targets = batch
            ...         distance = (self.model(inputs) - targets).abs()
            ...         self.log("largest", distance.max())
            ...         return distance.mean()
        """
        step = model_step(self.model, "training_step", self)
        return self.stepper.default_step(batch) if step is None else step(batch)

    def validation_step(self, batch: Any) -> Any:
        """A batch's loss and predictions in `evaluate`; override or define it as `training_step`, with its results."""
        step = model_step(self.model, "validation_step", self)
        return self.stepper.default_step(batch) if step is None else step(batch)

    def predict_step(self, batch: Any) -> Any:
        """What `predict` returns for the inputs of a batch; override or define it as `training_step`."""
        step = model_step(self.model, "predict_step", self)
        return predict_step(self.model, batch) if step is None else step(batch)

    def minimize(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Within a `training_step` that returns None: the backward pass of `loss` and an update.

        Args:
            loss: Shape ().
            optimizer: Whose parameters are changed, and no others; default None, the only one.
        """
        self.stepper.updates.minimize(loss, self.optimizer if optimizer is None else optimizer)

    def log(self, name: str, value: Tensor | float) -> None:
        """Within a step: report `value` under `name`, as its mean over the examples of the epoch so far.

        Nothing is read: a value stays on the device until somebody looks at it.

        Args:
            name: Not that of a metric; a validation's values get `val_` before theirs, as always.
            value: Shape (), or a number.

        Raises:
            RuntimeError: Outside of a step.
        """
        self.stepper.log(name, value)

    def summary(self, x: Any = None) -> Summary:
        """The layers of the model, with output shapes, parameters and bytes; `print` it for a table.

        Args:
            x: An example of the model's inputs, as a tensor, a tuple of positional or a dict of keyword arguments. It
                is run once, for the shapes and the number of operations, as XLA counts them. Default None, without.

        Returns:
            A `Summary`, whose attributes are the numbers. Tied weights count once.
        """
        return summarize(self.model, self.strategy, x)

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> Logs:
        """Train on one batch: the same program as in `fit`, without callbacks.

        Args:
            x, y: The inputs and targets of the batch; or all of it in `x`, as `fit` takes it.

        Returns:
            The loss and the metrics of this batch alone; reading a value waits for the device.
        """
        self._begin_training()
        with self.stepper.aside(), self.strategy.loop(), training(self.model):
            self.stepper.begin("train")
            return self.stepper.train([_one_batch(x, y, sample_weight)])

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> Logs:
        """The loss and the metrics of one batch, in eval mode; arguments and result as for `train_on_batch`."""
        self.strategy.end_step()
        with self.stepper.aside(), self.strategy.loop(), evaluating(self.model), torch.no_grad():
            self.stepper.begin("test")
            return self.stepper.test(_one_batch(x, y, sample_weight))

    def predict_on_batch(self, x: Any) -> Any:
        """The model's outputs for one batch of inputs, in eval mode: tensors on the device, nested as it returns them.

        Args:
            x: Inputs, or (inputs, targets).
        """
        self.strategy.end_step()
        with self.stepper.aside(), self.strategy.loop(), evaluating(self.model), torch.no_grad():
            self.stepper.begin("predict")
            return self.stepper.predict(plain_batch(x))[0]

    @property
    def optimizer(self) -> Optimizer:
        """The only optimizer, or the first one."""
        return next(iter(self.optimizers.values()))

    @property
    def learning_rate(self) -> float:
        """The current one, of the first param group of the first optimizer."""
        self._note_read("learning_rate")
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches for one update; may be set between updates, at the start of an epoch say."""
        return self.stepper.accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.stepper.set_accumulation(steps)

    def average_weights(self, momentum: float = 0.99) -> EMA:
        """Keep averages of the weights from the next training on, as `use_ema` does from the beginning.

        Args:
            momentum: How much of an average an update keeps. Default 0.99.

        Returns:
            The averages, `trainer.ema`; those that there are go on.

        Raises:
            ValueError: If there are some with another momentum.
        """
        if self.ema is None:
            self.ema = self.stepper.updates.ema = EMA(self.model, momentum)
        if self.ema.momentum != momentum:
            raise ValueError(f"the Trainer averages with a momentum of {self.ema.momentum}, {momentum} was asked for")
        return self.ema

    @property
    def keep_gradients(self) -> bool:
        """Whether each parameter's `.grad`, clipped, stays from one update to the next; default False, to save memory.

        Setting it ends the steps that were replayed: do so before `fit` or in `on_train_begin`.
        """
        return self.stepper.updates.keep_gradients

    @keep_gradients.setter
    def keep_gradients(self, value: bool) -> None:
        self.stepper.updates.keep_gradients = value
        if not value:
            for optimizer in self.optimizers.values():
                optimizer.zero_grad(set_to_none=True)

    @property
    def epoch(self) -> int:
        return self._counter("epoch")

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._counters["epoch"] = value

    @property
    def step(self) -> int:
        return self._counter("step")

    @step.setter
    def step(self, value: int) -> None:
        self._counters["step"] = value

    @property
    def num_examples(self) -> int:
        return self._counter("num_examples")

    @num_examples.setter
    def num_examples(self, value: int) -> None:
        self._counters["num_examples"] = value

    def _counter(self, name: str) -> int:
        self._note_read(name)
        return self._counters[name]

    def _note_read(self, name: str) -> None:
        """A step that reads this number depends on it: when it changes, the step's Python must run."""
        if self.stepper.user_state.recording:
            self.stepper.user_state.read.add(name)

    @abstractmethod
    def _begin_training(self) -> None:
        """Make what is to be there before the first step."""


def _one_batch(x: Any, y: Any, sample_weight: Any) -> Any:
    if sample_weight is not None:
        return plain_batch((x, y, sample_weight))
    return plain_batch(x if y is None else (x, y))
