"""The Trainer."""

from xlatrainer.trainer.trainer import Trainer

__all__ = ["Trainer"]
