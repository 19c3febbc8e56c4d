"""What acts around the training loop."""

from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.csv_logger import CSVLogger
from xlatrainer.callbacks.history import History
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.progbar_logger import ProgbarLogger

__all__ = ["CSVLogger", "Callback", "History", "LambdaCallback", "ProgbarLogger"]
