"""`Stepper`: the steps of a Trainer as programs. Owns what is recorded in a step, and the values that come out of it.

What a step computes and nobody needs (a prediction, the graph of the loss) must be gone when it ends, or it would be an
output of its program: each step is recorded in a function of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from xlatrainer.backend.precision import precision
from xlatrainer.data.batch import Arguments, Batch, split_batch
from xlatrainer.data.process_share import PartOfBatch
from xlatrainer.metrics.mean import Mean
from xlatrainer.metrics.metric import Metric, update_metrics
from xlatrainer.trainer.accumulation import Accumulation, GradientSums
from xlatrainer.trainer.logs import Logs
from xlatrainer.trainer.losses import LossFunction, SeveralLosses, checked_loss, predictions_of
from xlatrainer.trainer.padding import Padding
from xlatrainer.trainer.precision import Precision, full_precision
from xlatrainer.trainer.steps import Outcome, as_outcome, call_model, num_rows, rows_of
from xlatrainer.trainer.updates import Updates
from xlatrainer.trainer.user_state import UserState
from xlatrainer.trainer.weighting import EVEN, RowWeights

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["Phase", "Stepper"]

Phase = Literal["train", "test", "predict"]


class Stepper:
    """Makes the training, evaluation and prediction steps of `trainer`.

    Args:
        trainer: Its model, its `training_step` and so on are used; its strategy compiles the steps.
        loss_function: (output, target, weights) -> tensor of shape ().
        metrics: On the device already.
        updates: What a loss comes to.
        padding: Of short batches.
        precision: Of the forward pass.

    Attributes:
        loss_mean, metrics: The state of the pass over data that is going on.
        user_state: What a subclass keeps, see there.
        latest: The batches of the latest `train`, as they came.
    """

    def __init__(
        self,
        trainer: Trainer,
        loss_function: LossFunction,
        metrics: Sequence[Metric],
        updates: Updates,
        padding: Padding,
        precision: Precision,
    ) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        self.updates = updates
        self.loss_function = loss_function
        self.loss_mean = Mean("loss").to(self._strategy.device)
        self.metrics = list(metrics)
        self.user_state = UserState(trainer)
        self._logged: dict[Phase, dict[str, Mean]] = {"train": {}, "test": {}, "predict": {}}
        self._phase: Phase = "train"
        if updates.clipping.global_clipnorm is not None:
            for name in map(updates.norm_name, updates.optimizers):
                self._logged["train"][name] = Mean(name).to(self._strategy.device)
        self.accumulation = Accumulation(GradientSums(updates.optimizers.values(), self._strategy), 1)
        self._padding = padding
        self._precision = precision
        self._batch_rows = 1
        self._is_real: Tensor | None = None  # while a padded step is recorded, until the loss has left the rows out
        self.latest: Sequence[Any] = ()
        state = {
            "model": trainer.model,
            "updates": updates,
            "loss": loss_function,
            "metrics": [self.loss_mean, *self.metrics],
            "logged": self._logged,
            "attributes": self.user_state.attributes,
            "classes": [cls for cls in type(trainer).__mro__ if not cls.__module__.startswith("xlatrainer.trainer.")],
        }
        compiled = self._strategy.compiled
        self._training = compiled(self._record_training, state, "the training step")
        self._accumulating = compiled(self._record_accumulation, state, "the accumulating step")
        self._applying = compiled(self._record_application, state, "the update at the end of an epoch")
        self._testing = compiled(self._record_test, state, "the evaluation step")

    # steps

    def train(self, batches: Sequence[Any]) -> Logs:
        """Train on each of these batches and count them and the updates; returns the values after the last one."""
        self.latest = batches
        values: dict[str, Tensor] = {}
        for updates, run in self.accumulation.runs(batches):
            placed = [self._place(batch) for batch in run]
            self.user_state.gather()
            results = self._update_with(placed) if updates else self._accumulating.many(placed)
            self.user_state.hand_back()
            values = results[-1][0]
            self._trainer.num_examples += sum(num_examples for _, num_examples in results)
            if updates:
                self._trainer.step += len(results)
        return Logs(values, self._strategy)

    def _update_with(self, placed: list[tuple[Any, ...]]) -> list[Any]:
        """An update with each of these batches, and its step of the schedules."""
        schedules = self._trainer.schedules
        if len(placed) > 1 and schedules.may_foresee:
            set_schedules = schedules.foresee(len(placed))
            results = self._training.many(placed, set_schedules)
            if set_schedules is not None:
                set_schedules(len(placed))
            return results
        results = []
        for arguments in placed:
            results.append(self._training(*arguments))
            schedules.after_update()
        return results

    def finish_group(self) -> None:
        """Make the update of micro-batches that have not had theirs: the epoch has ended within a group."""
        if self.accumulation.position:
            self._applying()
            self._trainer.schedules.after_update()
            self._trainer.step += 1
            self.accumulation.position = 0

    def set_accumulation(self, steps: int) -> None:
        """Make an update every so many batches, from the next group on.

        Raises:
            ValueError: Within a group.
        """
        if self.accumulation.position:
            raise ValueError("gradient_accumulation_steps may only change between updates, at the start of an epoch")
        self.accumulation = Accumulation(self.accumulation.sums, steps)
        self.updates.sums = self.accumulation.sums if steps > 1 else None

    def memory_needed(self) -> int | None:
        """The bytes that the program of the latest training step needs on the device; None where that is not known."""
        return self._training.memory()

    def batches_until(self, step: int) -> int:
        """How many batches it takes until the Trainer has made `step` updates."""
        return (step - self._trainer.step) * self.accumulation.steps - self.accumulation.position

    def test(self, batch: Any) -> Logs:
        """Take a batch into the values of an evaluation."""
        placed = self._place(batch)
        self.user_state.gather()
        result = self._testing(*placed)
        self.user_state.hand_back()
        return Logs(result, self._strategy)

    def predict(self, batch: Any, averaged: bool = True) -> tuple[Any, int | None]:
        """The predictions for a batch, on the device, and how many of its rows are real; None for all.

        Args:
            batch: As it came.
            averaged: Whether with the averages of the weights, if there are any.
        """
        arguments = Arguments.of(self._trainer.model)
        if isinstance(batch, PartOfBatch):
            inputs, rows = self._place(replace(batch, batch=split_batch(batch.batch, arguments).inputs))
        else:
            inputs, rows = self._place(split_batch(batch, arguments).inputs)
        weights = self._averaged() if averaged else contextlib.nullcontext()
        with weights, self._precision.autocast(self._strategy.device):
            output = full_precision(self._trainer.predict_step(self._precision.of_inputs(inputs)))
        self._strategy.end_step()
        return output, rows

    def _place(self, batch: Any) -> tuple[Any, int | None]:
        padded, rows = self._padding.pad(batch)
        return self._strategy.to_device(padded), rows

    def default_step(self, batch: Any) -> Outcome:
        """Forward and loss, where neither a subclass nor the model has a step of its own."""
        inputs, target, weight = split_batch(batch, Arguments.of(self._trainer.model))
        output = call_model(self._trainer.model, inputs)
        weights = EVEN if weight is None and self._is_real is None else RowWeights(weight, self._is_real)
        logs: dict[str, Tensor] = {}
        output = full_precision(output)
        with self._precision.without_autocast(self._strategy.device):
            if isinstance(self.loss_function, SeveralLosses):
                parts = self.loss_function.parts(output, target, weights)
                loss = self.loss_function.total(parts)
                logs = {self.loss_function.names[key]: part for key, part in parts.items()}
            else:
                loss = checked_loss(self.loss_function(output, target, weights))
        is_real, self._is_real = self._is_real, None
        rows = self._batch_rows if self.user_state.recording else num_rows(target, inputs)
        return Outcome(loss, predictions_of(output), target, rows, logs, weight, is_real)

    # values

    def begin(self, phase: Phase) -> None:
        """Start the loss, the metrics and the logged values anew, for a pass over data."""
        self._phase = phase
        self._padding.begin()
        if phase != "predict":
            with precision():
                for metric in [self.loss_mean, *self.metrics, *self._logged[phase].values()]:
                    metric.reset()

    def values(self) -> Logs:
        """The values of the pass that is going on, computed anew."""
        with torch.no_grad(), precision():
            reported = [self.loss_mean, *self.metrics, *self._logged[self._phase].values()]
            values: dict[str, Tensor | float] = {metric.name: metric.compute() for metric in reported}
        self._strategy.end_step()
        return Logs(values, self._strategy)

    def values_state(self) -> dict[str, Any]:
        """The state of the training pass that is going on, on the device; for `load_values_state`."""
        return {
            "loss": self.loss_mean.state_dict(),
            "metrics": [metric.state_dict() for metric in self.metrics],
            "logged": {name: mean.state_dict() for name, mean in self._logged["train"].items()},
            "rows": self._padding.full,
        }

    def load_values_state(self, state: Mapping[str, Any]) -> None:
        """Go on with a training pass where `values_state` was taken, with the same metrics."""
        self._padding.full = state["rows"]
        with precision():
            self.loss_mean.load_state_dict(state["loss"])
            for metric, own in zip(self.metrics, state["metrics"], strict=True):
                metric.load_state_dict(own)
            for name, own in state["logged"].items():
                logged = self._logged["train"].setdefault(name, Mean(name).to(self._strategy.device))
                logged.load_state_dict(own)
        self._strategy.end_step()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A pass over data of its own: a training pass in whose midst it is then goes on as if there had been none."""
        progress = self._trainer.saver.progress
        if progress is None or progress.done is None:
            yield
            return
        phase, state = self._phase, self.values_state()
        try:
            yield
        finally:
            self._phase = phase
            self.load_values_state(state)

    def log(self, name: str, value: Tensor | float) -> None:
        """Take `value` into the mean `name` of this phase, for the rows of the batch of this step."""
        if not self.user_state.recording:
            raise RuntimeError(f"log({name!r}) outside of a step: call it in training_step or validation_step")
        tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
        if tensor.dim() > 0:
            raise ValueError(f"log({name!r}) takes a value of shape (), got {tuple(tensor.shape)}; log its mean()")
        if name in {metric.name for metric in [self.loss_mean, *self.metrics]}:
            raise ValueError(f"log({name!r}): there is a metric of that name; log it under another one")
        with precision():
            if name not in self._logged[self._phase]:
                self._logged[self._phase][name] = Mean(name).to(self._strategy.device)
            self._logged[self._phase][name].update(tensor.to(self._strategy.device), self._batch_rows)

    # what is recorded

    def _record_training(self, batch: Any, rows: int | None) -> tuple[dict[str, Tensor], int]:
        outcome = self._own_step("training_step", batch, rows)
        if outcome.loss is not None:
            if self.updates.sums is None:
                self.updates.minimize(outcome.loss)
            else:
                self.updates.accumulate(outcome.loss, outcome.num_examples)
                self.updates.apply()
        self._take_norms()
        return self._values(outcome), outcome.num_examples

    def _record_accumulation(self, batch: Any, rows: int | None) -> tuple[dict[str, Tensor], int]:
        outcome = self._own_step("training_step", batch, rows)
        if outcome.loss is None:
            raise ValueError("gradient_accumulation_steps needs a training_step that returns its loss, not None")
        self.updates.accumulate(outcome.loss, outcome.num_examples)
        return self._values(outcome), outcome.num_examples

    def _record_application(self) -> None:
        self.updates.apply()
        self._take_norms()

    def _take_norms(self) -> None:
        for name, (norm, made) in self.updates.norms.items():
            self._logged["train"][self.updates.norm_name(name)].update(norm, made)
        self.updates.norms.clear()
        self.updates.end_step()

    def _record_test(self, batch: Any, rows: int | None) -> dict[str, Tensor]:
        with self._averaged():
            outcome = self._own_step("validation_step", batch, rows)
        return self._values(outcome)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        """The model with the averages of its weights, if there are any."""
        return contextlib.nullcontext() if self.updates.ema is None else self.updates.ema.applied()

    def _own_step(self, name: str, batch: Any, rows: int | None) -> Outcome:
        self._batch_rows = rows_of(batch) if rows is None else rows
        self._is_real = None
        if rows is not None:
            self._is_real = torch.arange(rows_of(batch), device=self._strategy.device) < rows
        self.user_state.recording = True
        try:
            with self._precision.autocast(self._strategy.device):
                given = self._in_precision(batch) if self._precision.name == "bf16" else batch
                returned = getattr(self._trainer, name)(given)
            outcome = as_outcome(returned, batch, self._batch_rows, name)
            if self._is_real is not None:
                raise ValueError(
                    f"pad_last_batch pads rows that {name} does not leave out: it makes its loss itself. Let it call "
                    f"super().{name}(batch), or pass pad_last_batch=False"
                )
            for key, value in outcome.logs.items():
                self.log(key, value)
        finally:
            self._is_real = None
            self.user_state.recording = False
            self.user_state.gather()
        return outcome

    def _in_precision(self, batch: Any) -> Any:
        """The batch with its inputs in the precision of the model, its targets and weights as they are."""
        if isinstance(batch, Batch):
            return batch._replace(inputs=self._precision.of_inputs(batch.inputs))
        if isinstance(batch, tuple | list) and len(batch) in (2, 3):
            return type(batch)([self._precision.of_inputs(batch[0]), *batch[1:]])
        return self._precision.of_inputs(batch)

    @torch.no_grad()
    def _values(self, outcome: Outcome) -> dict[str, Tensor]:
        """Take the outcome into the metrics; returns the values so far.

        Sums over many batches are kept as they are, whatever precision policy there is: bfloat16 stops counting at 256.
        """
        with precision():
            return self._values_of(outcome)

    def _values_of(self, outcome: Outcome) -> dict[str, Tensor]:
        prediction = full_precision(outcome.prediction)
        reported: list[Metric] = [*self.metrics, *self._logged[self._phase].values()]
        if outcome.loss is not None:
            self.loss_mean.update(outcome.loss.float(), outcome.num_examples)
            reported.insert(0, self.loss_mean)
        if self.metrics and outcome.prediction is None:
            raise ValueError(
                f"the metric {self.metrics[0].name!r} needs predictions: let the step return a dict with 'loss', "
                f"'prediction' and 'target', or log what it computes itself"
            )
        update_metrics(self.metrics, prediction, outcome.target, outcome.sample_weight, outcome.is_real)
        return {metric.name: metric.compute() for metric in reported}
