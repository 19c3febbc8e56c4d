"""`Progress`: where in a `fit` a Trainer is, as a checkpoint has to know it to go on in the middle of an epoch.

Owns the place in the epoch, not the counters of the Trainer, which mean something outside of `fit` too.
"""

from collections.abc import Mapping
from typing import Any

from xlatrainer.data.epoch_iterator import EpochIterator
from xlatrainer.nested import map_tensors, tensors_in
from xlatrainer.strategies.strategy import Strategy
from xlatrainer.trainer.logs import Logs
from xlatrainer.trainer.stepper import Stepper

__all__ = ["Progress"]


class Progress:
    """The place in the epoch that is going on, if one is.

    Args:
        batches: What an epoch goes through.
        validation: What its validation goes through, if there is one.
        stepper: Holds the values of the pass that is going on.
        strategy: Fetches them.

    Attributes:
        done: How many batches of the epoch are done; None between two epochs.
        drawing: Whether the next batch is waited for, so that an error is the data's.
    """

    def __init__(
        self, batches: EpochIterator, validation: EpochIterator | None, stepper: Stepper, strategy: Strategy
    ) -> None:
        self.done: int | None = None
        self.drawing = False
        self._batches = batches
        self._validation = validation
        self._stepper = stepper
        self._strategy = strategy
        self._trained: Logs | None = None
        self._validation_state: dict[str, Any] | None = None
        self._frozen: dict[str, Any] | None = None

    def begin_epoch(self) -> None:
        """The epoch begins, with its first batch or, after `load_state_dict`, where it was left."""
        self.done = self.done or 0

    def begin_validation(self, trained: Logs) -> None:
        """All batches are done, with these values, and the validation begins."""
        self._trained = trained
        self._validation_state = None if self._validation is None else self._validation.state_dict(None)

    def end_epoch(self) -> None:
        """The epoch and its validation are done."""
        self.done = self._trained = self._validation_state = None

    @property
    def trained(self) -> Logs | None:
        """The values of the epoch if its batches are done and its validation is not."""
        return self._trained

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors, some of them on the device."""
        if self._frozen is not None:
            return self._frozen
        validation = self._validation_state
        if validation is None and self._validation is not None:
            validation = self._validation.state_dict(None)
        return {
            "done": self.done,
            "data": self._batches.state_dict(None if self._trained is not None else self.done),
            "validation": validation,
            "trained": None if self._trained is None else dict(self._trained),
            "values": None if self.done is None or self._trained is not None else self._stepper.values_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` says: sets random states, the place in the data, and the values of the epoch so far."""
        self.done = state["done"]
        in_validation = state["trained"] is not None
        data = [(self._batches, state["data"]), (self._validation, state["validation"])]
        for batches, place in data if in_validation else reversed(data):  # the last one's random states stay
            if batches is not None and place is not None:
                batches.load_state_dict(place)
        if in_validation:
            self._trained = Logs(state["trained"], self._strategy)
        if state["values"] is not None:
            self._stepper.load_values_state(state["values"])

    def freeze(self) -> None:
        """Keep the state as it is now, whatever is done with the Trainer's metrics and random numbers afterwards."""
        state = self.state_dict()
        values = list(tensors_in(state["values"]))
        fetched = iter(self._strategy.fetch(values))
        self._frozen = {**state, "values": map_tensors(lambda _: next(fetched), state["values"])}
