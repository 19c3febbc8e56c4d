"""One batch through the model: what a step of its own may return, how batches are taken apart and models are called.

Plain functions that record operators; none of them ends a step or reads a value. Batches come in as they are on the
device.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from xlatrainer.data.batch import plain_batch, split_batch
from xlatrainer.nested import tensors_in
from xlatrainer.trainer.losses import checked_loss, predictions_of

__all__ = [
    "Outcome",
    "as_outcome",
    "call_model",
    "model_step",
    "num_rows",
    "predict_step",
    "rows_of",
]


@dataclass(frozen=True)
class Outcome:
    """What a step computed.

    Attributes:
        loss: Shape (), or None after a step that has made its updates itself.
        prediction, target: What the metrics compare; None where the step does not say.
        num_examples: Rows of the batch.
        logs: Further values of shape (), by name.
        sample_weight: Of the rows, for weighted metrics; None for all alike.
        is_real: False for rows that only pad the batch, shape (rows,); None if there are none.
    """

    loss: Tensor | None
    prediction: Any = None
    target: Any = None
    num_examples: int = 1
    logs: Mapping[str, Tensor] = field(default_factory=dict)
    sample_weight: Any = None
    is_real: Tensor | None = None


def predict_step(model: nn.Module, batch: Any) -> Any:
    """Forward; the output's `.logits` if it has them."""
    return predictions_of(call_model(model, batch))


def model_step(model: nn.Module, name: str, trainer: Any) -> Callable[[Any], Any] | None:
    """The method `name` that a model defines to make a step of its own, None if it has none.

    It takes the batch, and the Trainer if it has a second parameter `trainer`.

    Raises:
        TypeError: If it wants anything else.
    """
    method = getattr(model, name, None)
    if not inspect.ismethod(method):
        return None
    parameters = list(inspect.signature(method).parameters.values())
    needed = [p.name for p in parameters[1:] if p.default is p.empty and p.kind in _POSITIONAL]
    if not parameters or needed not in ([], ["trainer"]):
        raise TypeError(
            f"{type(model).__name__}.{name} must take (batch) or (batch, trainer), it takes "
            f"{inspect.signature(method)}; a batch's number is not known to a step, which is compiled once for all"
        )
    if any(parameter.name == "trainer" for parameter in parameters[1:]):
        return lambda batch: method(batch, trainer)
    return method


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def as_outcome(returned: Any, batch: Any, rows: int, name: str) -> Outcome:
    """What `returned` by a step of the user's means.

    Args:
        returned: An `Outcome`; a loss of shape (); a dict with "loss", and perhaps "prediction" and "target" for the
            metrics and further values of shape () to log; a model's output with a `.loss`; or None, if the step has
            made its updates itself.
        batch: What the step was given; `rows`: how many examples are in it.
        name: Of the step, for messages.

    Raises:
        TypeError: For anything else.
    """
    if isinstance(returned, Outcome):
        return returned
    if returned is None:
        return Outcome(None, num_examples=rows)
    if isinstance(returned, Tensor):
        return Outcome(checked_loss(returned), num_examples=rows)
    if type(returned) is dict:
        logs = {key: value for key, value in returned.items() if key not in ("loss", "prediction", "target")}
        for key, value in logs.items():
            if not isinstance(value, Tensor) or value.dim() > 0:
                raise TypeError(
                    f"{name} returned {key!r} to log, which must be a tensor of shape (), not {value!r:.80}"
                )
        loss = None if returned.get("loss") is None else checked_loss(returned["loss"])
        return Outcome(loss, returned.get("prediction"), returned.get("target"), rows, logs)
    if isinstance(getattr(returned, "loss", None), Tensor):
        return Outcome(checked_loss(returned.loss), predictions_of(returned), split_batch(batch).targets, rows)
    raise TypeError(
        f"{name} must return a loss of shape (), a dict with 'loss', an output with .loss, or None after its own "
        f"updates; it returned a {type(returned).__name__}"
    )


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call `model` with a dict as keyword arguments, a tuple or list as positional ones, and all else as one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def rows_of(batch: Any) -> int:
    """The examples in a batch: the rows of its targets, or of its first tensor.

    A batch for a step of the user's may have any form.
    """
    batch = plain_batch(batch)
    if isinstance(batch, Mapping) or (isinstance(batch, tuple | list) and len(batch) in (2, 3)):
        inputs, target = (batch, batch.get("labels")) if isinstance(batch, Mapping) else batch[:2]
        return num_rows(target, inputs)
    return num_rows(batch)


def num_rows(*trees: Any) -> int:
    """The rows of the first tensor found; 1 if there is none with rows."""
    for tree in trees:
        for tensor in tensors_in(tree):
            if tensor.dim() > 0:
                return tensor.shape[0]
    return 1
