"""`Updates`: from a loss to changed parameters. Owns the backward pass and whatever happens to gradients.

Everything here is recorded into the step it is called in: no value is read, and all that a step changes is reachable
from the object, which the Trainer gives to its compiled steps.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Updates"]


class Updates:
    """Backward pass and update.

    Args:
        optimizers: By name; a Trainer with one optimizer calls it "optimizer".
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)

    def minimize(self, loss: Tensor, optimizer: Optimizer) -> None:
        """Backward pass of `loss` and an update by `optimizer`, of its own parameters alone.

        The gradients are dropped with the step: one that is still referred to when it ends would be written to memory
        and kept until the next step for nobody.
        """
        optimizer.zero_grad(set_to_none=True)
        if len(self.optimizers) > 1:
            loss.backward(inputs=[p for group in optimizer.param_groups for p in group["params"] if p.requires_grad])
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
