"""What acts around the training loop."""

from xlatrainer.callbacks.backup_and_restore import BackupAndRestore
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.csv_logger import CSVLogger
from xlatrainer.callbacks.device_stats import DeviceStats
from xlatrainer.callbacks.early_stopping import EarlyStopping
from xlatrainer.callbacks.ema import EMA
from xlatrainer.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from xlatrainer.callbacks.history import History
from xlatrainer.callbacks.json_logger import JSONLogger
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.learning_rate_monitor import LearningRateMonitor
from xlatrainer.callbacks.learning_rate_scheduler import LearningRateScheduler
from xlatrainer.callbacks.mlflow_logger import MLflowLogger
from xlatrainer.callbacks.model_checkpoint import ModelCheckpoint
from xlatrainer.callbacks.profiler import Profiler
from xlatrainer.callbacks.progbar_logger import ProgbarLogger, ProgressBar
from xlatrainer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from xlatrainer.callbacks.tensorboard import TensorBoard
from xlatrainer.callbacks.terminate_on_nan import TerminateOnNaN
from xlatrainer.callbacks.timer import Timer
from xlatrainer.callbacks.wandb_logger import WandbLogger

__all__ = [
    "EMA",
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "DeviceStats",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "History",
    "JSONLogger",
    "LambdaCallback",
    "LearningRateMonitor",
    "LearningRateScheduler",
    "MLflowLogger",
    "ModelCheckpoint",
    "Profiler",
    "ProgbarLogger",
    "ProgressBar",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
    "Timer",
    "WandbLogger",
]
