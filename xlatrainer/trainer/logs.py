"""`Logs`: values by name that stay on the device until somebody reads one. Reading is the only wait in a training."""

from collections.abc import Iterator, Mapping, MutableMapping

from torch import Tensor

from xlatrainer.strategies.strategy import Strategy

__all__ = ["Logs"]


class Logs(MutableMapping[str, float]):
    """A mapping from names to floats; reading any of them fetches all that are still on the device, together.

    Names, length and `in` cost nothing. A callback may add a value, `logs["learning_rate"] = 0.1`, a float or a tensor
    of shape (), which those after it see.

    Args:
        values: Tensors of shape () on the strategy's device, or floats.
        strategy: Fetches the tensors.

    Example:
        >>> import torch
        >>> from xlatrainer.strategies.single import SingleDeviceStrategy
        >>> logs = Logs({"loss": torch.tensor(0.5)}, SingleDeviceStrategy("cpu"))
        >>> list(logs), logs["loss"]
        (['loss'], 0.5)
    """

    def __init__(self, values: Mapping[str, Tensor | float], strategy: Strategy) -> None:
        self._values = dict(values)
        self._strategy = strategy

    def __getitem__(self, name: str) -> float:
        if isinstance(self._values[name], Tensor):
            self._fetch()
        return float(self._values[name])

    def __setitem__(self, name: str, value: Tensor | float) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values  # the inherited one would read the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        texts = (f"{name!r}: {'…' if isinstance(value, Tensor) else value}" for name, value in self._values.items())
        return f"Logs({{{', '.join(texts)}}})"

    @property
    def is_ready(self) -> bool:
        """Whether reading would not wait; never waits itself."""
        return all(self._strategy.is_ready(value) for value in self._values.values() if isinstance(value, Tensor))

    def with_validation(self, validation: "Logs") -> "Logs":
        """These values and those of `validation`, the latter under `val_` names."""
        renamed = {f"val_{name}": value for name, value in validation._values.items()}
        return Logs({**self._values, **renamed}, self._strategy)

    def _fetch(self) -> None:
        waiting = {name: value for name, value in self._values.items() if isinstance(value, Tensor)}
        fetched = self._strategy.fetch(list(waiting.values()))
        self._values.update({name: float(value) for name, value in zip(waiting, fetched, strict=True)})
