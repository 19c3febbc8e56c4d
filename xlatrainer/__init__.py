"""xlatrainer: train PyTorch models through XLA, on a lazy `xla` device, with a Keras-style Trainer.

import xlatrainer as xla
history = xla.Trainer(model, optimizer="adam", metrics=["accuracy"]).fit(loader, epochs=5)
"""

from xlatrainer import callbacks, data, debug, distributed, metrics, profiler, strategies
from xlatrainer.backend import counters
from xlatrainer.backend.capture import compile, step
from xlatrainer.backend.closures import add_step_closure
from xlatrainer.backend.device import (
    device,
    device_count,
    devices,
    manual_seed,
    real_devices,
    sync,
    wait_device_ops,
)
from xlatrainer.backend.memory import get_memory_info
from xlatrainer.backend.modes import eager_mode, is_eager_mode
from xlatrainer.backend.precision import precision
from xlatrainer.backend.program_cache import initialize_cache
from xlatrainer.backend.random import fork_rng, get_rng_state, set_rng_state
from xlatrainer.backend.stablehlo import load_stablehlo, save_stablehlo, stablehlo
from xlatrainer.distributed.launch import launch
from xlatrainer.trainer.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Trainer",
    "__version__",
    "add_step_closure",
    "callbacks",
    "compile",
    "counters",
    "data",
    "debug",
    "device",
    "device_count",
    "devices",
    "distributed",
    "eager_mode",
    "fork_rng",
    "get_memory_info",
    "get_rng_state",
    "initialize_cache",
    "is_eager_mode",
    "launch",
    "load_stablehlo",
    "manual_seed",
    "metrics",
    "precision",
    "profiler",
    "real_devices",
    "save_stablehlo",
    "set_rng_state",
    "stablehlo",
    "strategies",
    "step",
    "sync",
    "wait_device_ops",
]
