"""Where parameters and batches live."""

from xlatrainer.strategies.single import SingleDeviceStrategy
from xlatrainer.strategies.strategy import Strategy

__all__ = ["SingleDeviceStrategy", "Strategy"]
