"""`History`: the values of every epoch, as `fit` returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xlatrainer.callbacks.callback import Callback, LogValues
from xlatrainer.optional import require

__all__ = ["History"]


class History(Callback):
    """Records the logs of each epoch; `fit` adds one by itself and returns it.

    Attributes:
        epoch: The epochs recorded, counted from 0.
        history: For each name ("loss", "accuracy", "val_loss", ...) its values, one an epoch that had it; a resumed
            training has those of the epochs before, too.
        interrupted: Whether Ctrl-C or SIGTERM ended the training.

    Example:
        >>> History().history
        {}
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}
        self._epochs_of: dict[str, list[int]] = {}
        self.interrupted = False

    def on_train_begin(self, logs: LogValues) -> None:
        self.epoch = []
        self.history = {}
        self._epochs_of = {}
        self.interrupted = False

    def on_epoch_end(self, epoch: int, logs: LogValues) -> None:
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
            self._epochs_of.setdefault(name, []).append(epoch)

    def to_pandas(self) -> Any:
        """The values as a `pandas.DataFrame`: a row an epoch (the index "epoch"), a column a name.

        An epoch without a value, such as that of a validation every other epoch, has NaN.

        Raises:
            ImportError: If pandas is not installed.
        """
        pandas = require("pandas", "History.to_pandas", 'pip install "xlatrainer[pandas]"')
        columns = {
            name: pandas.Series(values, index=self._epochs_of[name], dtype="float64")
            for name, values in self.history.items()
        }
        return pandas.DataFrame(columns, index=pandas.Index(self.epoch, name="epoch"))

    def plot(self, names: Sequence[str] | None = None) -> Any:
        """Draw the values over the epochs, those of the training and of the validation in one picture.

        Args:
            names: Which, without `val_`; default None, all.

        Returns:
            The `matplotlib` figure, with one of its axes for each name: `figure.savefig("history.png")`.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: For a name that was not recorded, and if nothing was.
        """
        known = list(dict.fromkeys(name.removeprefix("val_") for name in self.history))
        chosen = known if names is None else list(names)
        unknown = sorted(set(chosen) - set(known))
        if unknown or not chosen:
            raise ValueError(f"there is nothing to plot for {unknown or 'an empty history'}; the names are {known}")
        pyplot = require("matplotlib.pyplot", "History.plot", 'pip install "xlatrainer[plot]"')
        figure, axes = pyplot.subplots(1, len(chosen), figsize=(5 * len(chosen), 4), squeeze=False, layout="tight")
        for axis, name in zip(axes[0], chosen, strict=True):
            for key, label in ((name, "training"), (f"val_{name}", "validation")):
                if key in self.history:
                    axis.plot(self._epochs_of[key], self.history[key], marker=".", label=label)
            axis.set_title(name)
            axis.set_xlabel("epoch")
            axis.legend()
        return figure

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "history": self.history, "epochs_of": self._epochs_of}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}
        self._epochs_of = {name: list(epochs) for name, epochs in state["epochs_of"].items()}
