"""`Trainer`: fit, evaluate and predict with a PyTorch model.

A table of contents: the loops are in `loops`, what a step records in `stepper`, what happens to gradients in `updates`,
what the data arguments mean in `inputs`, where things live in the strategy; saving and loading is in `persistence`.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from xlatrainer.backend.replay.optimizer_state import initialize_state
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.callback_list import CallbackList, stateful_callbacks
from xlatrainer.callbacks.durations import Duration
from xlatrainer.callbacks.history import History
from xlatrainer.callbacks.progbar_logger import ProgbarLogger, resolve_verbose
from xlatrainer.callbacks.timer import Timer
from xlatrainer.data.epoch_iterator import EpochIterator
from xlatrainer.metrics.registry import MetricSpec, resolve_metrics
from xlatrainer.strategies.registry import resolve_strategy
from xlatrainer.strategies.strategy import Strategy
from xlatrainer.trainer.checkpoint import load_state
from xlatrainer.trainer.clipping import Clipping
from xlatrainer.trainer.ema import EMA
from xlatrainer.trainer.inputs import Limits, batches_to_evaluate, batches_to_predict, batches_to_train
from xlatrainer.trainer.interruption import EXIT_CODE, Interruption
from xlatrainer.trainer.loops import FitPlan, evaluate_loop, fit_loop, predict_loop
from xlatrainer.trainer.losses import LossSpec, binary_threshold, resolve_loss
from xlatrainer.trainer.optimizers import OptimizerSpec, parameter_names, resolve_optimizers
from xlatrainer.trainer.padding import Padding
from xlatrainer.trainer.persistence import Persistence
from xlatrainer.trainer.precision import LossScale, Precision
from xlatrainer.trainer.recomputation import recompute_in_backward
from xlatrainer.trainer.saver import SaveFrequency, Saver
from xlatrainer.trainer.schedules import SchedulerSpec, Schedules
from xlatrainer.trainer.step_methods import StepMethods
from xlatrainer.trainer.stepper import Stepper
from xlatrainer.trainer.trials import dev_run, overfit_verdict, validate_first
from xlatrainer.trainer.tuning import LearningRates, find_batch_size, find_lr
from xlatrainer.trainer.updates import Updates

__all__ = ["Trainer"]

_T = TypeVar("_T", bound=Callback)

_V = TypeVar("_V")

_OF_DEV_RUN = ("self", "fast_dev_run")


class Trainer(Persistence, StepMethods):
    """Trains a PyTorch model on the `xla` device, with Keras's methods.

    The model is moved to the strategy's device, in place, when the Trainer is created. Batches are `(inputs, targets)`
    or `(inputs, targets, sample_weight)`; inputs that are a tuple are the model's positional arguments, a dict its
    keyword arguments. A batch may also be a dict of the arguments of a model that returns a `.loss`.

    Args:
        model: Any module.
        optimizer: A name in any case ("sgd", "adam", "adamw", "rmsprop", ...), a class of `torch.optim`, a function of
            the parameters, or an optimizer of `model`'s parameters, whose param groups and state are kept. Default
            "adamw" with PyTorch's own settings (a learning rate of 0.001, a weight decay of 0.01). A dict of optimizers
            of parts of the model is for a `training_step` of your own, see there.
        loss: A name ("cross_entropy", "nll", "mse", "mae", "huber", "smooth_l1", "bce", "bce_with_logits"), or a
            function or module (prediction, target) -> tensor of shape (), the mean over the batch. Default None: the
            `.loss` of the model's output if it has one, cross-entropy for integer targets, mean squared error for float
            targets. A model that returns a dict or a tuple, with targets alike, has a dict or list of losses: their sum
            is trained, each is logged ("NAME_loss", "output_0_loss").
        metrics: Names ("accuracy", "f1", "auc", "mae", ...: `METRICS`), functions (prediction, target) -> tensor,
            `Metric` objects, and those of torchmetrics. Default none.
        callbacks: `Callback` objects for every `fit`, `evaluate` and `predict`. Default none.
        strategy: Where to train: "single", one `xla` device; over several, "ddp" (each has the whole model), "fsdp"
            (each has a part of it), "hsdp", "zero1", "zero2"; "auto", which picks one of the first three; or a
            `Strategy` object. Default "single". See docs/sharding.md.
        learning_rate: The optimizer's `lr`, unless the optimizer is an instance. Default None, the optimizer's own.
        weighted_metrics: As `metrics`; the sample weights of the batches count in these. Default none.
        steps_per_execution: Training steps in one program, as in Keras: callbacks see the first batch of each such
            group begin and the last one end. Worth it where a step takes less than a few milliseconds. Default 1.
        gradient_accumulation_steps: Batches whose gradients are summed up for one update, which is that of one big
            batch of all their rows (batch norm aside, which sees each batch on its own). Hooks are called for every
            batch, `step` counts updates. A group that an epoch's end cuts short is applied by its own size. Default 1.
        accumulate_grad_batches: Lightning's name for it.
        global_clipnorm: The largest norm of all gradients together, as `torch.nn.utils.clip_grad_norm_`; the norm
            before is in the logs as "grad_norm", the mean over the epoch's updates. Default None, no clipping.
        clipnorm: The largest norm of each parameter's gradient on its own, as in Keras. Default None.
        clipvalue: The largest absolute value of a gradient's element. Default None. At most one of the three.
        scheduler: A `torch.optim.lr_scheduler` object of the optimizer, a function of the optimizer that makes one, a
            list of these, or a dict of them by the names of several optimizers. The epoch's "learning_rate" is then in
            the logs. Nothing is compiled for a new learning rate. Default None.
        scheduler_interval: "step", after each update, or "epoch". Default None: "step" for `OneCycleLR`, `CyclicLR` and
            `xlatrainer.trainer.WarmupCosineLR`, "epoch" for others; `ReduceLROnPlateau` always has "epoch".
        scheduler_monitor: What `ReduceLROnPlateau` looks at; default None, "val_loss" or without validation "loss".
        use_ema: Keep averages of the weights, which `evaluate`, the validation of `fit` and `predict` then use. Default
            False.
        ema_momentum: How much of an average an update keeps. Default 0.99.
        loss_weights: Of several losses, by name or in order; default None, which means 1.
        pad_last_batch: Fill a short last batch up to the rows of the others with copies of its last row, which loss,
            metrics and counts leave out: one program for all batches. A batch norm does see them. Default False, a
            program of its own for the short batch.
        output_dir: A folder or URL; `fit` then writes checkpoints into its folder "checkpoints", when an epoch ends or
            as `save_freq` says, when the training ends, and when it is interrupted. Default None: nothing is written
            unless asked for.
        save_freq: "epoch", a number of steps, or a time such as "10 minutes" or a `timedelta`. Default "epoch".
        max_to_keep: How many checkpoints of this training stay in `output_dir`; the newest one with finite weights
            always does. None keeps all. Default 3.
        async_save: Whether `fit` goes on while a checkpoint is written. Default True.
        precision: "fp32"; "bf16-mixed" or "fp16-mixed", whose forward pass is under `torch.autocast` while weights,
            losses and metrics stay float32; or "bf16", where the model itself is bfloat16. Lightning's and Keras's
            names do too. In float16 the loss has a scale, and updates with gradients that are not finite are left out,
            without a read. Default "fp32".
        gradient_checkpointing: Classes of modules whose activations are computed again in the backward pass instead of
            being kept: `[nn.TransformerEncoderLayer]`. The numbers stay the same. Default none.

    Attributes:
        model: The model, on the device.
        optimizer: The optimizer. Its param groups may be changed at any time; a new learning rate compiles nothing.
        optimizers: All optimizers by name: `{"optimizer": optimizer}`, or the dict that was given, on the device.
        loss_scale: With "fp16-mixed", what losses are multiplied with; else None.
        ema: The averages of the weights, or None; `trainer.ema.copy_to_model()` makes them the model's own.
        learning_rate: The current one, of the first param group of `optimizer`.
        epoch: Epochs completed; `step`: updates made; `num_examples`: examples trained on. All are saved and loaded.
        stop_training: Set it to True (from a callback, say) to end `fit` after the current batch.

    Example:
        >>> import torch
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
        optimizer: OptimizerSpec | Mapping[str, Optimizer] = "adamw",
        loss: LossSpec = None,
        metrics: Sequence[MetricSpec] = (),
        callbacks: Sequence[Callback] = (),
        strategy: str | Strategy = "single",
        *,
        learning_rate: float | None = None,
        weighted_metrics: Sequence[MetricSpec] = (),
        steps_per_execution: int = 1,
        gradient_accumulation_steps: int | None = None,
        accumulate_grad_batches: int | None = None,
        global_clipnorm: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        scheduler: SchedulerSpec = None,
        scheduler_interval: str | None = None,
        scheduler_monitor: str | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        loss_weights: Mapping[str, float] | Sequence[float] | None = None,
        pad_last_batch: bool = False,
        output_dir: str | os.PathLike[str] | None = None,
        save_freq: SaveFrequency = "epoch",
        max_to_keep: int | None = 3,
        async_save: bool = True,
        precision: str | int = "fp32",
        gradient_checkpointing: Sequence[type[nn.Module]] = (),
    ) -> None:
        before = frozenset(vars(self))
        if steps_per_execution < 1:
            raise ValueError(f"steps_per_execution must be at least 1, got {steps_per_execution}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module object, got {model!r}")
        loss_function = resolve_loss(loss, loss_weights)
        resolved_metrics = resolve_metrics(metrics, weighted_metrics, threshold=binary_threshold(loss))
        self.strategy = resolve_strategy(strategy, model)
        names = parameter_names(model)
        computing = Precision(precision)
        computing.convert(model)
        recompute_in_backward(model, gradient_checkpointing)
        self.model = self.strategy.setup(model)
        self.optimizers = resolve_optimizers(optimizer, names, self.model, learning_rate)
        self.schedules = Schedules(scheduler, self.optimizers, scheduler_interval, scheduler_monitor)
        for each in loss.values() if isinstance(loss, Mapping) else loss if isinstance(loss, list | tuple) else [loss]:
            if isinstance(each, nn.Module):
                each.to(self.strategy.device)
        for metric in resolved_metrics:
            metric.to(self.strategy.device)
        self.ema = EMA(self.model, ema_momentum) if use_ema else None
        self.precision, self.loss_scale = computing.name, LossScale.of(computing, self.optimizers, self.strategy.device)
        clipping = Clipping(global_clipnorm, clipnorm, clipvalue)
        updates = Updates(self.optimizers, clipping, self.ema, computing, self.loss_scale)
        self.stepper = Stepper(
            self,
            loss_function,
            resolved_metrics,
            updates,
            Padding(pad_last_batch, self.strategy.batch_parts, self.strategy.process),
            computing,
        )
        self.gradient_accumulation_steps = _one_name(
            1, gradient_accumulation_steps=gradient_accumulation_steps, accumulate_grad_batches=accumulate_grad_batches
        )
        self.steps_per_execution = steps_per_execution
        self.callbacks = list(callbacks)
        self.stop_training = False
        self.saver = Saver(self, output_dir, save_freq, max_to_keep, async_save)
        self._hooks = CallbackList((), self, {})
        self._counters = {"epoch": 0, "step": 0, "num_examples": 0}
        self.stepper.user_state.exclude(frozenset(vars(self)) - before)

    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Sequence[Callback] = (),
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        max_steps: int | None = None,
        max_time: Duration | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        overfit_batches: int | float | None = None,
        fast_dev_run: bool | int = False,
        num_sanity_val_steps: int = 0,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> History:
        """Train for some epochs.

        Each batch is one program on the device: forward, backward, update and metrics. It is compiled when a batch of
        a new shape comes first. Once two batches in a row have done the same, the model's Python runs no more as long
        as nothing that it can reach changes: see `xlatrainer.compile`. **A last batch that is shorter is a shape of its
        own: one more program, compiled in the first epoch only**, and it counts by its number of examples, so that the
        epoch's loss and metrics are those of all examples.

        Args:
            x: Batches: a DataLoader, a list, a Keras-style sequence or any other iterable. Or what is batched here: a
                dataset of torch or Hugging Face, or tensors and arrays: one, a dict of them (the model's keyword
                arguments), or with `y` also a tuple (its positional ones). docs/trainer.md has the forms of a batch.
            y: Targets for tensors and arrays, of as many rows. Default None.
            batch_size: Rows in a batch, for what is batched here. Default None, which means 32.
            epochs: The number of the last epoch, as in Keras: `epochs - initial_epoch` are trained. Default 1.
            verbose: 0 silent, 1 a progress bar, 2 one line an epoch. Default "auto": 1 in a terminal, otherwise 2.
            callbacks: Further callbacks, for this call.
            validation_split: The part of tensors, arrays or a dataset to validate on: its last rows, set aside before
                shuffling. Default 0.0, none.
            validation_data: Data to evaluate after each epoch: as for `x`, or a tuple (x, y) or (x, y, sample_weight)
                of tensors and arrays. Its values get `val_` names. Default None.
            shuffle: Whether each epoch has an order of its own, from torch's CPU generator: for tensors, arrays,
                datasets that can be indexed and Keras-style sequences. All else keeps its order. Default True.
            class_weight: Weights of classes by number, for integer targets; a class left out weighs 1. They multiply
                the sample weights. Default None.
            sample_weight: A weight for each row of tensors and arrays; batches have theirs as a third item or under the
                key "sample_weight". The loss is the weighted sum divided by the number of rows. Default None.
            initial_epoch: Epochs to leave out, for a training that goes on: `trainer.epoch` after a `load`. Default 0.
            steps_per_epoch: Batches in an epoch. The next epoch goes on where the last one stopped; data that ends
                starts anew, unless all of it was in this epoch, which then ends early with a warning. An iterator that
                ends ends the training. Default None, all there are.
            validation_steps: Batches in a validation, which starts anew each time where the data can. Default None,
                all.
            validation_batch_size: As `batch_size`, for the validation. Default None, the same.
            validation_freq: Validate after every so many epochs, or a list of the epochs, counted from 1, to validate
                after. Default 1.
            max_steps: End when `trainer.step` has come to this number, at the latest. Default None, no such end.
            max_time: End after the batch in which this time is up: "2 hours", "DD:HH:MM:SS", a `timedelta` or seconds.
                Of `epochs`, `max_steps` and this, what comes first ends the training. Default None.
            limit_train_batches, limit_val_batches: At most so many batches of an epoch or a validation (an int), or
                such a part of them (a float up to 1.0); each starts anew. Default None, all; 0 validates nothing.
            overfit_batches: Train on the first batches alone, so many or such a part, the same ones in one order every
                epoch; validate on as many. Says at the end whether they were learned. Default None.
            fast_dev_run: Go through so many batches (True is 1) of training and validation and print what was seen:
                nothing is written, and callbacks that write are left out. Default False.
            num_sanity_val_steps: Batches to validate before the training, which changes nothing. Default 0, none: a
                mistake in the validation shows after the first epoch.
            resume_from: A checkpoint to go on from, in the middle of an epoch too, with the same losses as if the
                training had never been stopped; or "last" for the newest whole one in `output_dir`, where the training
                begins if there is none. Pass the same data and arguments. Default None.

        Returns:
            The `History`: `history.history["loss"]` has one value an epoch, each weighted by examples.

        Raises:
            TypeError: If `x` does not yield batches, or one of them is no batch.
            ValueError: If there is no batch to train on, if data never ends and `steps_per_epoch` is not given, if an
                argument does not go with this kind of data, or if no default loss fits.
            CheckpointError: If the checkpoint to resume from is damaged, or one cannot be written.
            SystemExit: With code 143, after SIGTERM has ended the training and a checkpoint was written.
        """
        if fast_dev_run:
            return dev_run(self, int(fast_dev_run), {k: v for k, v in locals().items() if k not in _OF_DEV_RUN})
        resumed = self.saver.find(resume_from, [*self.callbacks, *callbacks])
        if resumed is not None:
            initial_epoch = resumed.first_epoch(initial_epoch)
        if epochs < 1 or initial_epoch < 0:
            raise ValueError(
                f"epochs must be at least 1 and initial_epoch at least 0, got {epochs} and {initial_epoch}"
            )
        batches, validation = batches_to_train(
            self.model,
            x,
            y,
            sample_weight,
            epochs=epochs - initial_epoch,
            batch_size=batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
            steps_per_epoch=steps_per_epoch,
            validation_split=validation_split,
            validation_data=validation_data,
            validation_batch_size=validation_batch_size,
            validation_steps=validation_steps,
            limits=Limits(limit_train_batches, limit_val_batches, overfit_batches),
        )
        if validation is not None:
            validation.share(*self.strategy.process, self.strategy.batch_parts)
        validate_first(self, validation, num_sanity_val_steps)
        callbacks = [*callbacks, *([] if max_time is None else [Timer(max_time, verbose=1)])]
        history = _find(History, [*self.callbacks, *callbacks])
        if history is None:
            history = History()
            callbacks = [*callbacks, history]
        hooks = self._hooks = self._begin(callbacks, verbose, epochs, batches)
        self._begin_training()
        if resumed is not None:
            load_state(self, resumed, everything=False)
        plan = FitPlan(batches, validation, initial_epoch, epochs, validation_freq, max_steps, resumed)
        loaders = closing(batches), closing(batches if validation is None else validation)
        with hooks.guarded(), loaders[0], loaders[1], self.saver.guarded(), Interruption(self.strategy) as interruption:
            fit_loop(self, plan, hooks, interruption)
        if overfit_batches is not None and resolve_verbose(verbose):
            print(overfit_verdict(history, batches.num_batches))
        history.interrupted = interruption.asked
        if interruption.is_preemption:
            raise SystemExit(EXIT_CODE)
        return history

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> dict[str, float]:
        """The loss and the metrics over `x`, in eval mode.

        Args:
            x, y, batch_size, sample_weight: As for `fit`.
            verbose: As for `fit`.
            steps: Batches to go through. Default None, all.
            callbacks: Further callbacks, for this call.

        Returns:
            The values by name: "loss" and the metrics, over all examples alike.
        """
        batches = batches_to_evaluate(self.model, x, y, sample_weight, batch_size=batch_size, steps=steps)
        hooks = self._begin(callbacks, verbose, 1, batches)
        self.strategy.end_step()
        with hooks.guarded(), closing(batches), self.stepper.aside():
            return dict(evaluate_loop(self, batches, hooks))

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Any:
        """The model's outputs for `x`, in eval mode and without gradients.

        Args:
            x: Inputs: a tensor or array of shape (rows, ...), a tuple or dict of them, or data as for `fit`, whose
                batches may be of inputs alone if those are tensors or dicts. Targets are left unused.
            batch_size: Rows a batch, for what is batched here. Default None, which means 32.
            verbose: As for `fit`.
            steps: Batches to go through. Default None, all.
            callbacks: Further callbacks, for this call.

        Returns:
            The outputs on the CPU, those of all batches concatenated in order; the `.logits` of outputs that have them.
            Tuples, lists and dicts of tensors keep their structure.

        Raises:
            ValueError: If `batch_size` is given with batches.
        """
        batches = batches_to_predict(self.model, x, batch_size=batch_size, steps=steps)
        hooks = self._begin(callbacks, verbose, 1, batches)
        self.strategy.end_step()
        with hooks.guarded(), closing(batches), self.stepper.aside():
            return predict_loop(self, batches, hooks)

    def find_lr(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        *,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        steps: int = 100,
        early_stop_threshold: float | None = 4.0,
    ) -> LearningRates:
        """Try learning rates: each batch is trained on with a higher one. The Trainer is afterwards what it was before.

        Args:
            x, y, batch_size: As for `fit`; the batches are gone through again if there are too few.
            min_lr, max_lr: The first and the last rate, of the first param group; the others keep their ratio to it.
            steps: How many rates, in equal ratios. Default 100.
            early_stop_threshold: End when a loss is above so many times the smallest one. Default 4.0; None, never.

        Returns:
            The rates and losses, with a `suggestion` and a `plot()`.

        Raises:
            ValueError: For limits that are none, for data that ends, and for a step that returns no loss.
        """
        return find_lr(
            self,
            x,
            y,
            batch_size=batch_size,
            min_lr=min_lr,
            max_lr=max_lr,
            steps=steps,
            early_stop_threshold=early_stop_threshold,
        )

    def find_batch_size(
        self, x: Any, y: Any = None, *, memory: int | None = None, max_batch_size: int = 8192, margin: float = 0.05
    ) -> int:
        """The largest power of two of rows whose training step fits into memory, by XLA's account of its program.

        Two small batches are measured, and the size that follows from them is tried: nothing runs out of memory. Where
        there is no such account (the CPU strategy), the size is doubled until memory runs out. The Trainer is
        afterwards what it was before.

        Args:
            x, y: As for `fit`; the rows of the first batch are used over and over.
            memory: Bytes that a step may need. Default None: the device's memory, or where XLA computes on the CPU,
                what is free.
            max_batch_size: The largest size to return. Default 8192.
            margin: The share of the memory to leave free. Default 0.05.

        Raises:
            ValueError: If not even one row fits.
        """
        return find_batch_size(self, x, y, memory=memory, max_batch_size=max_batch_size, margin=margin)

    def stop(self) -> None:
        """End `fit` after the current batch, its epoch's validation and hooks: sets `stop_training`."""
        self.stop_training = True

    def stateful_parts(self) -> dict[str, Any]:
        """All that a training goes on from besides the model and the counters, by name, with the same names each time.

        Each has a `state_dict()` and a `load_state_dict(state)`: the optimizer ("optimizer", or "optimizer.NAME" of
        several), the schedulers ("scheduler", or "scheduler.0" and so on), the scale of losses ("loss_scale"), the
        averages of the weights ("ema"), the gradients of a group that is not whole yet ("accumulation"), and the
        callbacks that have a state ("callback.EarlyStopping"), of the latest `fit` if there was one.
        """
        several = len(self.optimizers) > 1
        parts: dict[str, Any] = {
            f"optimizer.{name}" if several else "optimizer": optimizer for name, optimizer in self.optimizers.items()
        }
        parts.update(self.schedules.stateful_parts())
        if self.loss_scale is not None:
            parts["loss_scale"] = self.loss_scale
        if self.ema is not None:
            parts["ema"] = self.ema
        if self.gradient_accumulation_steps > 1:
            parts["accumulation"] = self.stepper.accumulation
        callbacks = self._hooks.callbacks or self.callbacks
        parts.update((f"callback.{name}", value) for name, value in stateful_callbacks(callbacks).items())
        return parts

    def _begin_training(self) -> None:
        for optimizer in self.optimizers.values():
            initialize_state(optimizer, self.strategy.put_beside)
            self.strategy.place_optimizer(optimizer)
        if self.ema is not None:
            self.ema.start()
            self.strategy.place_like(*self.ema.pairs())
        self.strategy.end_step()

    def _begin(
        self, callbacks: Sequence[Callback], verbose: str | int, epochs: int, batches: EpochIterator
    ) -> CallbackList:
        """The callbacks of a call: the Trainer's, the call's own, and the progress display if it is not silent."""
        batches.share(*self.strategy.process, self.strategy.batch_parts)
        is_first = self.strategy.process[0] == 0
        level = resolve_verbose(verbose) if is_first else 0
        given = [each for each in (*self.callbacks, *callbacks) if is_first or each.on_every_process]
        if level and not _find(ProgbarLogger, given):
            given.append(ProgbarLogger())
        return CallbackList(given, self, {"epochs": epochs, "steps": batches.num_batches, "verbose": level})


def _one_name(default: _V, **given: _V | None) -> _V:
    """The value of an argument that has several names.

    Raises:
        ValueError: If more than one of them is given.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if len(values) > 1:
        raise ValueError(f"{' and '.join(values)} are names of the same argument; give one of them")
    return next(iter(values.values()), default)


def _find(kind: type[_T], callbacks: Sequence[Callback]) -> _T | None:
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)
