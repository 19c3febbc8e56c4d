"""One batch through the model: the training, evaluation and prediction step as plain functions.

They record a step; none of them ends it or reads a value. Batches come in as they are on the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from xlatrainer.data.batch import split_batch
from xlatrainer.strategies.nested import tensors_in
from xlatrainer.trainer.losses import LossFunction, checked_loss, predictions_of

__all__ = ["Outcome", "call_model", "eval_step", "predict_step", "train_step"]


@dataclass(frozen=True)
class Outcome:
    """What a step computed: `loss` of shape (), the predictions, the targets, and the number of examples."""

    loss: Tensor
    prediction: Any
    target: Any
    num_examples: int


def train_step(model: nn.Module, optimizer: Optimizer, loss_function: LossFunction, batch: Any) -> Outcome:
    """Forward, backward, update.

    The gradients are dropped with the step: one that is still referred to when it ends would be written to memory and
    kept until the next step for nobody.
    """
    optimizer.zero_grad(set_to_none=True)
    outcome = eval_step(model, loss_function, batch)
    outcome.loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return outcome


def eval_step(model: nn.Module, loss_function: LossFunction, batch: Any) -> Outcome:
    """Forward and loss."""
    inputs, target, _ = split_batch(batch)
    output = call_model(model, inputs)
    loss = checked_loss(loss_function(output, target))
    return Outcome(loss, predictions_of(output), target, _num_examples(target, inputs))


def predict_step(model: nn.Module, inputs: Any) -> Any:
    """Forward; the output's `.logits` if it has them."""
    return predictions_of(call_model(model, inputs))


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call `model` with a dict as keyword arguments, a tuple or list as positional ones, and all else as one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _num_examples(*trees: Any) -> int:
    """The rows of the first tensor found; 1 if there is none with rows."""
    for tree in trees:
        for tensor in tensors_in(tree):
            if tensor.dim() > 0:
                return tensor.shape[0]
    return 1
