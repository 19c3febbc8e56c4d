"""The batch is named exactly, with few reads; on request the first thing that is not finite too."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.callbacks.helpers import counts, since, small_trainer
from tests.trainer.helpers import DEVICES, class_batches, strategy_on
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.callbacks.terminate_on_nan import TerminateOnNaN
from xlatrainer.trainer.trainer import Trainer

Batches = list[tuple[Tensor, Tensor]]


def poisoned(batches: Batches, index: int, value: float = float("nan")) -> Batches:
    inputs, targets = batches[index]
    bad = inputs.clone()
    bad[0, 0] = value
    return [*batches[:index], (bad, targets), *batches[index + 1 :]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("index", "check_every"), [(0, 1), (3, 1), (5, 4), (6, 4), (11, 50), (2, 5)])
def test_the_batch_is_named(device: str, index: int, check_every: int) -> None:
    trainer = small_trainer(device)
    batches = poisoned(class_batches(rows=16 * 12), index)
    with pytest.warns(
        RuntimeWarning, match=rf"nan from batch {index} of epoch 0 on \(step {index + 1}\); the training"
    ):
        trainer.fit(batches, epochs=3, callbacks=[TerminateOnNaN(check_every)], verbose=0)
    assert trainer.epoch == 1
    assert trainer.step == min(-(-(index + 1) // check_every) * check_every, 12)


def test_a_finite_training_goes_on_and_little_is_read() -> None:
    trainer = small_trainer("xla")
    batches = class_batches(rows=16 * 20)
    trainer.fit(batches, verbose=0)
    before = counts()
    trainer.fit(batches, epochs=2, callbacks=[TerminateOnNaN(check_every=10)], verbose=0)
    # every 10 batches and, for the history, at the end of the epochs, which are read once
    assert since(before) == {"Execute": 40, "UncachedCompile": 0, "TransferFromDevice": 4, "Replay": 40}


def test_an_error_if_wished() -> None:
    trainer = small_trainer()
    with pytest.raises(FloatingPointError, match="the loss is nan from batch 1 of epoch 0") as raised:
        trainer.fit(poisoned(class_batches(), 1, float("inf")), callbacks=[TerminateOnNaN(raise_error=True)], verbose=0)
    assert "TerminateOnNaN" in raised.value.__notes__[0]
    with pytest.raises(ValueError, match="check_every is a number of batches"):
        TerminateOnNaN(0)


class Root(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.sqrt()


class Model(nn.Module):
    """Takes the root of its first layer's square, unless told to take that of the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.root = Root()
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        sign = torch.where(inputs.sum() > 1e6, -1.0, 1.0)
        return self.last(self.root(self.first(inputs).square() * sign + 1.0))


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_module_is_named(device: str) -> None:
    torch.manual_seed(0)
    trainer = Trainer(Model(), "sgd", learning_rate=1e-3, strategy=strategy_on(device))
    batches = poisoned(class_batches(), 4, 1e7)
    seen: list[Any] = []

    class Look(TerminateOnNaN):
        def on_train_batch_begin(self, batch: int, logs: Any) -> None:
            super().on_train_batch_begin(batch, logs)
            seen.append({name: value.cpu() for name, value in self._weights.items()})

    with pytest.warns(RuntimeWarning, match=r"from batch 4 .*: the output of root \(Root\) is not finite"):
        trainer.fit(batches, callbacks=[Look(find_module=True)], verbose=0)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value.cpu(), seen[4][name], rtol=0, atol=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in trainer.model.modules())


@pytest.mark.parametrize(
    ("loss", "index", "value", "message"),
    [
        (None, 2, float("nan"), "its inputs are not finite"),
        (lambda output, target: output.sum() * float("inf"), 0, 0.0, "every module is finite, so it is the loss"),
    ],
)
def test_inputs_and_losses_are_told_apart(loss: Any, index: int, value: float, message: str) -> None:
    trainer = small_trainer(loss=loss)
    with pytest.warns(RuntimeWarning, match=message):
        trainer.fit(poisoned(class_batches(), index, value), callbacks=[TerminateOnNaN(find_module=True)], verbose=0)


def test_the_batch_is_run_with_the_models_own_weights() -> None:
    """The averages are still finite where the weights are too large for their squares."""
    trainer = small_trainer(use_ema=True, ema_momentum=0.999)

    def grow(batch: int, logs: Any) -> None:
        if batch == 2:
            with torch.no_grad():
                trainer.model.get_parameter("3.weight").fill_(3e38)

    callbacks = [LambdaCallback(on_train_batch_begin=grow), TerminateOnNaN(find_module=True)]
    with pytest.warns(RuntimeWarning, match=r"batch 2 .*: the output of 3 \(Linear\) is not finite"):
        trainer.fit(class_batches(), callbacks=callbacks, verbose=0)


def test_a_parameter_that_an_update_has_spoilt_is_named() -> None:
    trainer = small_trainer(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=float("inf")))
    with pytest.warns(RuntimeWarning, match=r"batch 1 .*: the parameter 0.weight was not finite before it"):
        trainer.fit(class_batches(), callbacks=[TerminateOnNaN(find_module=True)], verbose=0)
