"""`Callback`: the hooks around the loop, when each one fires, and what its `logs` hold.

Knows the Trainer only by what `set_trainer` gives it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

if TYPE_CHECKING:
    from xlatrainer.trainer.trainer import Trainer

__all__ = ["Callback", "LogValues", "MaybeReady"]

LogValues = MutableMapping[str, float]


@runtime_checkable
class MaybeReady(Protocol):
    """Logs whose values may not be computed yet."""

    @property
    def is_ready(self) -> bool:
        """Whether reading a value would not wait."""


class Callback:
    """Base class of what acts during training; override the hooks you need.

    `fit` calls, in this order::

        on_train_begin
          on_epoch_begin(epoch)                       once an epoch, counted from 0
            on_train_batch_begin(batch)               once a batch, counted from 0 in each epoch
            on_train_batch_end(batch, logs)
            on_test_begin                             with validation data, after the last batch of the epoch
              on_test_batch_begin(batch)
              on_test_batch_end(batch, logs)
            on_test_end(logs)
          on_epoch_end(epoch, logs)
        on_train_end(logs)

    `evaluate` calls the `on_test_*` hooks, `predict` the `on_predict_*` hooks. An exception, of a callback or of
    anything else, ends the call: `on_exception(error)` of every callback, then `on_train_end` of those that have had
    `on_train_begin` and no `on_train_end` yet, and the exception goes on. `on_save(path)` and `on_load(path)` follow
    `trainer.save` and `trainer.load`.

    A callback that overrides `state_dict` and `load_state_dict` has its state in the checkpoints.

    `logs` maps names to values: the loss and the metrics over the epoch so far, in `on_epoch_end` those of the
    validation too, under `val_` names. **Reading a value waits for the device; not reading it costs nothing**, so
    a hook that runs every batch should read only now and then. Where a hook has nothing to report, `logs` is empty.
    A value that a callback sets, `logs["learning_rate"] = 0.1`, is seen by the callbacks after it, and at the end of an
    epoch by `History` and the progress display too.

    Attributes:
        trainer: The Trainer that calls. Set `trainer.stop_training = True` to stop after the current batch.
        model: The model being trained.
        params: "epochs", "steps" (batches an epoch, None if unknown) and "verbose" of the current call.
        writes_files: Whether it writes files or sends values away; `fit(fast_dev_run=...)` leaves those out.
        on_every_process: Whether it is called in each of several processes that train together; what writes or shows
            what all of them know is called in the first alone.
        runs_last: Whether it is called after all those for which this is False, as what saves their state must be; only
            its `on_train_end` comes before theirs, since they may put other weights into the model then.
    """

    writes_files: bool = False
    on_every_process: bool = True
    runs_last: bool = False
    num_calls: int = 0  # of `fit`, `evaluate` and `predict` that are going on, one within another

    trainer: Trainer
    model: nn.Module
    params: Mapping[str, Any]

    def set_trainer(self, trainer: Trainer) -> None:
        """Called before the first hook of each `fit`, `evaluate` or `predict`."""
        self.trainer = trainer
        self.model = trainer.model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Called before the first hook of each `fit`, `evaluate` or `predict`."""
        self.params = params

    def on_train_begin(self, logs: LogValues) -> None:
        """`fit` begins."""

    def on_train_end(self, logs: LogValues) -> None:
        """`fit` ends; `logs` are those of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: LogValues) -> None:
        """An epoch begins."""

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        """An epoch and its validation are done."""

    def on_train_batch_begin(self, batch: int, logs: LogValues) -> None:
        """A training batch begins; calls `on_batch_begin`."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        """A training batch has been handed to the device; calls `on_batch_end`."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: LogValues) -> None:
        """Another name for `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: LogValues) -> None:
        """Another name for `on_train_batch_end`."""

    def on_test_begin(self, logs: LogValues) -> None:
        """`evaluate` begins, or the validation of an epoch."""

    def on_test_end(self, logs: LogValues) -> None:
        """`evaluate` ends, or the validation of an epoch; the names in `logs` have no `val_`."""

    def on_test_batch_begin(self, batch: int, logs: LogValues) -> None:
        """A batch of `evaluate` or of a validation begins."""

    def on_test_batch_end(self, batch: int, logs: LogValues) -> None:
        """A batch of `evaluate` or of a validation has been handed to the device."""

    def on_predict_begin(self, logs: LogValues) -> None:
        """`predict` begins."""

    def on_predict_end(self, logs: LogValues) -> None:
        """`predict` ends."""

    def on_predict_batch_begin(self, batch: int, logs: LogValues) -> None:
        """A batch of `predict` begins."""

    def on_predict_batch_end(self, batch: int, logs: LogValues) -> None:
        """A batch of `predict` has been handed to the device."""

    def on_preempt(self, logs: LogValues) -> None:
        """SIGTERM has ended the training; a checkpoint is written if the Trainer has an `output_dir`."""

    def on_exception(self, error: BaseException) -> None:
        """An exception ends the `fit`, `evaluate` or `predict`; it is raised again when all callbacks were told."""

    def on_save(self, path: str | os.PathLike[str]) -> None:
        """The Trainer's state has been saved at `path`."""

    def on_load(self, path: str | os.PathLike[str]) -> None:
        """The Trainer's state has been loaded from `path`."""

    def resume_from(self) -> str | os.PathLike[str] | None:
        """The checkpoint that the coming `fit` goes on from, if there is one and it is given no other. Default none."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this callback: plain data and tensors. Default nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; the `fit` that goes on with it, or has begun, does not reset it."""
