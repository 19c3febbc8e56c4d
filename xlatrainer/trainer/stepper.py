"""`Stepper`: the steps of a Trainer as programs. Owns what is recorded in a step, and the values that come out of it.

What a step computes and nobody needs (a prediction, the graph of the loss) must be gone when it ends, or it would be an
output of its program: each step is recorded in a function of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from xlatrainer.data.batch import split_batch
from xlatrainer.metrics.mean import Mean
from xlatrainer.metrics.metric import Metric, update_metrics
from xlatrainer.trainer.logs import Logs
from xlatrainer.trainer.losses import LossFunction
from xlatrainer.trainer.steps import Outcome, as_outcome, rows_of
from xlatrainer.trainer.updates import Updates
from xlatrainer.trainer.user_state import UserState

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["Phase", "Stepper"]

Phase = Literal["train", "test"]


class Stepper:
    """Makes the training, evaluation and prediction steps of `trainer`.

    Args:
        trainer: Its model, its `training_step` and so on are used; its strategy compiles the steps.
        loss_function: (output, target) -> tensor of shape ().
        metrics: On the device already.
        updates: What a loss comes to.

    Attributes:
        loss_mean, metrics: The state of the pass over data that is going on.
        user_state: What a subclass keeps, see there.
    """

    def __init__(
        self, trainer: Trainer, loss_function: LossFunction, metrics: Sequence[Metric], updates: Updates
    ) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        self.updates = updates
        self.loss_function = loss_function
        self.loss_mean = Mean("loss").to(self._strategy.device)
        self.metrics = list(metrics)
        self.user_state = UserState(trainer)
        self._logged: dict[Phase, dict[str, Mean]] = {"train": {}, "test": {}}
        self._phase: Phase = "train"
        self._batch_rows = 1
        state = {
            "model": trainer.model,
            "updates": updates,
            "loss": loss_function,
            "metrics": [self.loss_mean, *self.metrics],
            "logged": self._logged,
            "attributes": self.user_state.attributes,
            "classes": [cls for cls in type(trainer).__mro__ if cls.__module__ != "xlatrainer.trainer.trainer"],
        }
        self._training = self._strategy.compiled(self._record_training, state, "the training step")
        self._testing = self._strategy.compiled(self._record_test, state, "the evaluation step")

    # steps

    def train(self, batches: Sequence[Any]) -> Logs:
        """Train on each of these batches and count them; returns the values after the last one."""
        placed = [(self._strategy.to_device(batch),) for batch in batches]
        self.user_state.gather()
        results = [self._training(*placed[0])] if len(placed) == 1 else self._training.many(placed)
        self.user_state.hand_back()
        self._trainer.step += len(results)
        self._trainer.num_examples += sum(num_examples for _, num_examples in results)
        return Logs(results[-1][0], self._strategy)

    def test(self, batch: Any) -> Logs:
        """Take a batch into the values of an evaluation."""
        placed = self._strategy.to_device(batch)
        self.user_state.gather()
        result = self._testing(placed)
        self.user_state.hand_back()
        return Logs(result, self._strategy)

    def predict(self, batch: Any) -> Any:
        """The predictions for a batch, on the device."""
        output = self._trainer.predict_step(self._strategy.to_device(split_batch(batch).inputs))
        self._strategy.end_step()
        return output

    # values

    def begin(self, phase: Phase) -> None:
        """Start the loss, the metrics and the logged values anew, for a pass over data."""
        self._phase = phase
        for metric in [self.loss_mean, *self.metrics, *self._logged[phase].values()]:
            metric.reset()

    def log(self, name: str, value: Tensor | float) -> None:
        """Take `value` into the mean `name` of this phase, for the rows of the batch of this step."""
        if not self.user_state.recording:
            raise RuntimeError(f"log({name!r}) outside of a step: call it in training_step or validation_step")
        tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
        if tensor.dim() > 0:
            raise ValueError(f"log({name!r}) takes a value of shape (), got {tuple(tensor.shape)}; log its mean()")
        if name in {metric.name for metric in [self.loss_mean, *self.metrics]}:
            raise ValueError(f"log({name!r}): there is a metric of that name; log it under another one")
        if name not in self._logged[self._phase]:
            self._logged[self._phase][name] = Mean(name).to(self._strategy.device)
        self._logged[self._phase][name].update(tensor.to(self._strategy.device), self._batch_rows)

    # what is recorded

    def _record_training(self, batch: Any) -> tuple[dict[str, Tensor], int]:
        outcome = self._own_step("training_step", batch)
        if outcome.loss is not None:
            self.updates.minimize(outcome.loss, self._only_optimizer())
        return self._values(outcome), outcome.num_examples

    def _record_test(self, batch: Any) -> dict[str, Tensor]:
        return self._values(self._own_step("validation_step", batch))

    def _only_optimizer(self) -> torch.optim.Optimizer:
        if len(self.updates.optimizers) > 1:
            raise TypeError(
                f"training_step returned a loss, but there are several optimizers "
                f"({', '.join(self.updates.optimizers)}): make the updates in it with trainer.minimize(loss, "
                f"optimizer), and return None"
            )
        return next(iter(self.updates.optimizers.values()))

    def _own_step(self, name: str, batch: Any) -> Outcome:
        self._batch_rows = rows_of(batch)
        self.user_state.recording = True
        try:
            outcome = as_outcome(getattr(self._trainer, name)(batch), batch, self._batch_rows, name)
            for key, value in outcome.logs.items():
                self.log(key, value)
        finally:
            self.user_state.recording = False
            self.user_state.gather()
        return outcome

    @torch.no_grad()
    def _values(self, outcome: Outcome) -> dict[str, Tensor]:
        """Take the outcome into the metrics; returns the values so far."""
        reported: list[Metric] = [*self.metrics, *self._logged[self._phase].values()]
        if outcome.loss is not None:
            self.loss_mean.update(outcome.loss, outcome.num_examples)
            reported.insert(0, self.loss_mean)
        if self.metrics and outcome.prediction is None:
            raise ValueError(
                f"the metric {self.metrics[0].name!r} needs predictions: let the step return a dict with 'loss', "
                f"'prediction' and 'target', or log what it computes itself"
            )
        update_metrics(self.metrics, outcome.prediction, outcome.target)
        return {metric.name: metric.compute() for metric in reported}
