"""Strategies by name: the one table, and the error that lists it."""

from xlatrainer.strategies.single import SingleDeviceStrategy
from xlatrainer.strategies.strategy import Strategy

__all__ = ["STRATEGIES", "resolve_strategy"]

STRATEGIES: dict[str, type[Strategy]] = {"single": SingleDeviceStrategy}


def resolve_strategy(strategy: str | Strategy) -> Strategy:
    """The strategy itself, or a new one of the class with that name.

    Args:
        strategy: A `Strategy`, or a name of `STRATEGIES`.

    Raises:
        ValueError: For a name that is not in the table; the message lists those that are.
        TypeError: For anything else.

    Example:
        >>> resolve_strategy(SingleDeviceStrategy("cpu")).device
        device(type='cpu')
    """
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(
            f"strategy must be a Strategy object or one of {sorted(STRATEGIES)}, not {type(strategy).__name__}"
        )
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; the names are {sorted(STRATEGIES)}")
    return STRATEGIES[strategy]()
