"""`TerminateOnNaN`: end the training when the loss is no finite number, and say where it began."""

from __future__ import annotations

import bisect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from xlatrainer.backend._private_api import tree_flatten
from xlatrainer.callbacks.callback import Callback, LogValues
from xlatrainer.callbacks.weights import copy_weights, put_weights

__all__ = ["TerminateOnNaN"]


class TerminateOnNaN(Callback):
    """Stops when the loss is NaN or infinite, and names the batch in which it became so.

    The losses of the batches stay on the device until every `check_every` batches, and at the end of each epoch, one of
    them is read: the loss so far is not finite as soon as one batch's is not. Then those before it are looked through.

    Args:
        check_every: Batches from one look to the next; default 50. Training goes on meanwhile.
        raise_error: True raises a `FloatingPointError`; default False warns, and stops the training.
        find_module: True looks at every batch (which waits for the device) and keeps a copy of the weights from before
            it; the batch is then run again, forward, and the warning names the first parameter, input or module output
            that is not finite. The weights from before that batch are left in the model. Slow: to find a fault.

    Example:
        >>> TerminateOnNaN(check_every=10).check_every
        10
    """

    def __init__(self, check_every: int = 50, raise_error: bool = False, find_module: bool = False) -> None:
        if check_every < 1:
            raise ValueError(f"check_every is a number of batches, at least 1; got {check_every}")
        self.check_every = 1 if find_module else check_every
        self.raise_error = raise_error
        self.find_module = find_module
        self._waiting: list[tuple[int, int, LogValues]] = []
        self._weights: dict[str, Tensor] = {}

    def on_epoch_begin(self, epoch: int, logs: LogValues) -> None:
        self._epoch = epoch
        self._waiting = []

    def on_train_batch_begin(self, batch: int, logs: LogValues) -> None:
        if self.find_module:
            self._weights = copy_weights(self.trainer)

    def on_train_batch_end(self, batch: int, logs: LogValues) -> None:
        self._waiting.append((batch, self.trainer.step, logs))
        if len(self._waiting) >= self.check_every:
            self._check()

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        self._check()

    def on_train_end(self, logs: LogValues) -> None:
        self._waiting = []
        self._weights = {}

    def _check(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting or not _is_bad(waiting[-1][2]):
            return
        batch, step, logs = waiting[bisect.bisect_left(waiting, True, key=lambda entry: _is_bad(entry[2]))]
        message = f"the loss is {logs['loss']} from batch {batch} of epoch {self._epoch} on (step {step})"
        if self.find_module:
            message += f": {self._first_bad()}"
        self.trainer.stop_training = True
        if self.raise_error:
            raise FloatingPointError(message)
        warnings.warn(f"{message}; the training ends here", RuntimeWarning, stacklevel=2)

    def _first_bad(self) -> str:
        """What of the batch's forward pass is not finite first."""
        put_weights(self.trainer, self._weights)
        flags: list[tuple[str, Tensor]] = []
        for name, parameter in self.model.named_parameters():
            _note(flags, f"the parameter {name} was not finite before it", parameter)
        with torch.no_grad(), _observed(self.model, flags):
            for batch in self.trainer.stepper.latest:
                self.trainer.stepper.predict(batch, averaged=False)
        put_weights(self.trainer, self._weights)
        found = self.trainer.strategy.fetch([flag for _, flag in flags])
        self.trainer.strategy.end_step()
        bad = [text for (text, _), flag in zip(flags, found, strict=True) if flag]
        return bad[0] if bad else "the output of every module is finite, so it is the loss function's"


def _is_bad(logs: LogValues) -> bool:
    return "loss" in logs and not math.isfinite(logs["loss"])


def _note(flags: list[tuple[str, Tensor]], text: str, values: Any) -> None:
    for leaf in tree_flatten(values)[0]:
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            flags.append((text, ~torch.isfinite(leaf.detach()).all()))


@contextmanager
def _observed(model: nn.Module, flags: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Note the model's inputs, and the output of each module as it is done, for the length of a forward pass."""

    def inputs_of(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        _note(flags, "its inputs are not finite", (args, dict(kwargs)))

    def output_of(name: str) -> Any:
        return lambda module, args, output: _note(
            flags, f"the output of {name or 'the model'} ({type(module).__name__}) is not finite", output
        )

    handles: list[Any] = [model.register_forward_pre_hook(inputs_of, with_kwargs=True)]
    handles += [module.register_forward_hook(output_of(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
