"""`Updates`: from a loss to changed parameters. Owns the backward pass and whatever happens to gradients.

Everything here is recorded into the step it is called in: no value is read, and all that a step changes is reachable
from the object, which the Trainer gives to its compiled steps.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.trainer.accumulation import GradientSums
from xlatrainer.trainer.clipping import Clipping
from xlatrainer.trainer.ema import EMA
from xlatrainer.trainer.precision import LossScale, Precision

__all__ = ["Updates"]


class Updates:
    """Backward pass and update.

    The gradients are dropped with the step unless somebody asks for them: one that is still referred to when it ends is
    written to memory and kept until the next step.

    Args:
        optimizers: By name; a Trainer with one optimizer calls it "optimizer".
        clipping: What is done to gradients before an update.
        ema: Averages of the weights to bring on; default None.
        precision: Of the training; default None, float32.
        scale: Of losses in float16; default None, none.

    Attributes:
        sums: Where gradients are accumulated; None where every batch makes an update.
        keep_gradients: Whether the gradients of an update stay until the next one.
        norms: The global norm of the latest update's gradients, by the optimizer's name, and for how many updates it
            counts, until it is taken out.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        clipping: Clipping,
        ema: EMA | None = None,
        precision: Precision | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self.optimizers = dict(optimizers)
        self.clipping = clipping
        self.ema = ema
        self.scale = scale
        self._precision = Precision("fp32") if precision is None else precision
        self.sums: GradientSums | None = None
        self.keep_gradients = False
        self.norms: dict[str, tuple[Tensor, Tensor | int]] = {}

    def norm_name(self, optimizer: str) -> str:
        """What the norm of an optimizer's gradients is logged as."""
        return "grad_norm" if len(self.optimizers) == 1 else f"{optimizer}_grad_norm"

    def accumulate(self, loss: Tensor, rows: int) -> None:
        """Backward pass of `loss`, the mean over `rows` rows; no update."""
        assert self.sums is not None
        optimizer = self._only()
        optimizer.zero_grad(set_to_none=True)
        self._backward(loss, optimizer)
        self.sums.add(rows)

    def apply(self) -> None:
        """An update with what has been accumulated."""
        assert self.sums is not None
        self.sums.take()
        self._update(self._only())

    def minimize(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        """Backward pass of `loss` and an update by `optimizer`, of its own parameters alone.

        Raises:
            ValueError: If gradients are accumulated, or `optimizer` is not the Trainer's.
        """
        if self.sums is not None:
            raise ValueError(
                "gradient_accumulation_steps is for a training_step that returns its loss; this one makes its updates "
                "itself, and may accumulate itself too"
            )
        optimizer = self._only() if optimizer is None else optimizer
        optimizer.zero_grad(set_to_none=True)
        self._backward(loss, optimizer)
        self._update(optimizer)

    def end_step(self) -> None:
        """All updates of a step are made."""
        if self.scale is not None:
            self.scale.end_step()

    def _backward(self, loss: Tensor, optimizer: Optimizer) -> None:
        inputs = None if len(self.optimizers) == 1 else _trained_by(optimizer)
        with self._precision.without_autocast(loss.device):
            if self.scale is None:
                loss.backward(inputs=inputs)
            else:
                (loss * self.scale.scale).backward(inputs=inputs)
                self.scale.unscale(_trained_by(optimizer))

    def _update(self, optimizer: Optimizer) -> None:
        parameters = _trained_by(optimizer)
        with self._precision.without_autocast(parameters[0].device):
            norm = self.clipping.apply(parameters)
            made: Tensor | int = 1
            if self.scale is None:
                optimizer.step()
            else:
                made = self.scale.step(optimizer, parameters).int()
            if norm is not None:
                norm = norm if isinstance(made, int) else torch.where(made > 0, norm, 0)
                self.norms[self._name_of(optimizer)] = (norm, made)
            if self.ema is not None:
                self.ema.update(parameters)
        if not self.keep_gradients:
            optimizer.zero_grad(set_to_none=True)

    def _name_of(self, optimizer: Optimizer) -> str:
        for name, known in self.optimizers.items():
            if known is optimizer:
                return name
        raise ValueError(f"minimize needs one of the Trainer's optimizers ({', '.join(self.optimizers)})")

    def _only(self) -> Optimizer:
        if len(self.optimizers) > 1:
            raise TypeError(
                f"training_step returned a loss, but there are several optimizers ({', '.join(self.optimizers)}): make "
                f"the updates in it with trainer.minimize(loss, optimizer), and return None"
            )
        return next(iter(self.optimizers.values()))


def _trained_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
