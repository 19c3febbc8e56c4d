"""The Trainer."""

from xlatrainer.trainer.checkpoints.consolidation import consolidate
from xlatrainer.trainer.schedules import WarmupCosineLR
from xlatrainer.trainer.trainer import Trainer

__all__ = ["Trainer", "WarmupCosineLR", "consolidate"]
