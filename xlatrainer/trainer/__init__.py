"""The Trainer."""

from xlatrainer.trainer.schedules import WarmupCosineLR
from xlatrainer.trainer.trainer import Trainer

__all__ = ["Trainer", "WarmupCosineLR"]
