"""xlatrainer: train PyTorch models through XLA, on a lazy `xla` device, with a Keras-style Trainer.

    import xlatrainer as xla
    history = xla.Trainer(model, optimizer="adam", metrics=["accuracy"]).fit(loader, epochs=5)
"""

from xlatrainer.backend.device import (
    device,
    device_count,
    devices,
    manual_seed,
    real_devices,
    sync,
    wait_device_ops,
)

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "device",
    "device_count",
    "devices",
    "manual_seed",
    "real_devices",
    "sync",
    "wait_device_ops",
]
