"""fit, evaluate and predict against a hand-written PyTorch loop, on CPU torch and on `xla`."""

import copy
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.trainer.helpers import DEVICES, ON_CPU, class_batches, classifier, evaluated, hand_written, strategy_on
from xlatrainer.callbacks.callback import Callback
from xlatrainer.callbacks.history import History
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.trainer.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make_optimizer", [SGD, ADAM, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)])
def test_fit_equals_a_hand_written_loop(device: str, make_optimizer: Any) -> None:
    """The last batch is short: 100 rows in batches of 16. Its mean must not count as much as the others'."""
    model, batches = classifier(), class_batches()
    reference, expected = hand_written(model, make_optimizer, batches, epochs=3)
    trainer = Trainer(model, make_optimizer, metrics=["accuracy"], strategy=strategy_on(device))
    history = trainer.fit(batches, epochs=3, verbose=0)
    assert history.epoch == [0, 1, 2]
    assert history.history["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert history.history["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_validation_evaluate_and_predict_equal_the_model_in_eval_mode(device: str) -> None:
    model, batches, held_out = classifier(), class_batches(), class_batches(rows=50, seed=3)
    reference, _ = hand_written(model, SGD, batches, epochs=2)
    trainer = Trainer(model, SGD, metrics=["accuracy"], strategy=strategy_on(device))
    history = trainer.fit(batches, epochs=2, validation_data=held_out, verbose=0)
    expected = evaluated(reference, held_out)
    assert {name: history.history[f"val_{name}"][-1] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert trainer.evaluate(held_out, verbose=0) == pytest.approx(expected, abs=1e-5)
    inputs = torch.cat([x for x, _ in held_out])
    with torch.no_grad():
        scores = reference(inputs)
    for predicted in (
        trainer.predict(held_out, verbose=0),
        trainer.predict([x for x, _ in held_out], verbose=0),
        trainer.predict(inputs, batch_size=7, verbose=0),
        trainer.predict(inputs.numpy(), verbose=0),
    ):
        assert predicted.device.type == "cpu"
        torch.testing.assert_close(predicted, scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_changed_learning_rate_is_used(device: str) -> None:
    model, batches = classifier(), class_batches()
    expected_model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected_model.parameters(), lr=0.1)
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(expected_model(inputs), targets).backward()
            optimizer.step()
    trainer = Trainer(model, "sgd", learning_rate=0.1, strategy=strategy_on(device))

    def change(epoch: int, logs: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)

    trainer.fit(batches, epochs=2, callbacks=[LambdaCallback(on_epoch_begin=change)], verbose=0)
    torch.testing.assert_close(model.state_dict()["0.weight"].cpu(), expected_model.state_dict()["0.weight"])


def test_the_kinds_of_loader_agree() -> None:
    inputs, targets = (torch.cat(column) for column in zip(*class_batches(), strict=True))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(TensorDataset(inputs, targets))

    class Fresh:
        def __iter__(self) -> Iterator[Any]:
            return iter(class_batches())

    arrays = [(x.numpy(), y.numpy()) for x, y in class_batches()]
    stream = DataLoader(Stream(), batch_size=16)
    losses = []
    for data in (class_batches(), loader, stream, Fresh(), arrays, (batch for batch in class_batches())):
        trainer = Trainer(classifier(), SGD, strategy=ON_CPU)
        losses.append(trainer.fit(data, verbose=0).history["loss"])
    assert losses == [losses[0]] * 6


def test_inputs_are_called_by_their_structure() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(torch.stack([a, b], 1)).squeeze(1)

    a, b, y = torch.randn(3, 10)
    losses = []
    for inputs in ((a, b), [a, b], {"b": b, "a": a}):
        torch.manual_seed(0)
        trainer = Trainer(TwoInputs(), SGD, strategy=ON_CPU)
        losses.append(trainer.fit([(inputs, y)], epochs=3, verbose=0).history["loss"])
        assert trainer.predict([(inputs, y)], verbose=0).shape == (10,)
    assert losses[0] == losses[1] == losses[2]


def test_a_model_that_returns_its_loss() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            logits = self.layer(x)
            return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)

    dicts = [{"x": x, "labels": y} for x, y in class_batches()]
    torch.manual_seed(0)
    model = WithLoss()
    _, expected = hand_written(model.layer, SGD, class_batches(), epochs=2)
    trainer = Trainer(model, SGD, metrics=["accuracy"], strategy=ON_CPU)
    history = trainer.fit(dicts, epochs=2, verbose=0)
    assert history.history["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert history.history["accuracy"] == pytest.approx(expected["accuracy"])
    assert trainer.predict(dicts, verbose=0).shape == (100, 3)


def test_outputs_keep_their_structure_in_predict() -> None:
    class TwoOutputs(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"twice": 2 * x, "rows": (x.sum(1),)}

    x = torch.randn(300, 4)
    predicted = Trainer(nn.Sequential(TwoOutputs(), nn.Identity()), lambda _: SGD([nn.Parameter(x)]), strategy=ON_CPU)
    outputs = predicted.predict(x, verbose=0)
    torch.testing.assert_close(outputs["twice"], 2 * x)
    torch.testing.assert_close(outputs["rows"][0], x.sum(1))


def test_modes_are_those_of_each_phase_and_are_restored() -> None:
    model = classifier()
    model[1].eval()  # a frozen batch norm stays frozen
    seen: dict[str, tuple[bool, bool]] = {}

    def note(phase: str) -> Any:
        return lambda *_: seen.update({phase: (model.training, model[1].training)})

    hooks = ("on_train_batch_end", "on_test_batch_end", "on_epoch_end", "on_predict_batch_end")
    callback = LambdaCallback(**{hook: note(hook) for hook in hooks})
    trainer = Trainer(model, SGD, callbacks=[callback], strategy=ON_CPU)
    trainer.fit(class_batches(), validation_data=class_batches(), verbose=0)
    trainer.predict(torch.randn(4, 8), verbose=0)
    assert seen == {
        "on_train_batch_end": (True, False),
        "on_test_batch_end": (False, False),
        "on_epoch_end": (True, False),
        "on_predict_batch_end": (False, False),
    }
    assert (model.training, model[1].training) == (True, False)
    model.eval()
    trainer.fit(class_batches(), verbose=0)
    assert seen["on_train_batch_end"] == (True, True)
    assert not any(module.training for module in model.modules())


def test_modes_are_restored_after_an_error() -> None:
    model = classifier()
    trainer = Trainer(model, SGD, loss="mse", strategy=ON_CPU)
    with pytest.raises(ValueError, match="same shape"):
        trainer.evaluate(class_batches(), verbose=0)
    assert all(module.training for module in model.modules())


def test_evaluate_and_predict_change_nothing() -> None:
    model = classifier()
    trainer = Trainer(model, SGD, strategy=ON_CPU)
    before = copy.deepcopy(model.state_dict())
    trainer.evaluate(class_batches(), verbose=0)
    trainer.predict(torch.randn(4, 8), verbose=0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (trainer.epoch, trainer.step, trainer.num_examples) == (0, 0, 0)


def test_stop_training_ends_the_epoch_after_its_validation() -> None:
    seen: list[Any] = []

    class Stop(Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            seen.append(batch)
            if batch == 2:
                self.trainer.stop_training = True

    trainer = Trainer(classifier(), SGD, strategy=ON_CPU)
    history = trainer.fit(class_batches(), epochs=5, validation_data=class_batches(), callbacks=[Stop()], verbose=0)
    assert seen == [0, 1, 2]
    assert history.epoch == [0]
    assert len(history.history["val_loss"]) == 1
    assert trainer.fit(class_batches(), epochs=2, verbose=0).epoch == [0, 1]


def test_counters_and_a_second_fit() -> None:
    trainer = Trainer(classifier(), SGD, strategy=ON_CPU)
    trainer.fit(class_batches(), epochs=2, verbose=0)
    assert (trainer.epoch, trainer.step, trainer.num_examples) == (2, 14, 200)
    assert trainer.fit(class_batches(), epochs=3, initial_epoch=2, verbose=0).epoch == [2]
    assert (trainer.epoch, trainer.step) == (3, 21)


def test_two_trainings_of_one_trainer_equal_one_long_one() -> None:
    once, twice = (Trainer(classifier(), ADAM, strategy=ON_CPU) for _ in range(2))
    expected = once.fit(class_batches(), epochs=4, verbose=0).history["loss"]
    losses = [twice.fit(class_batches(), epochs=2, verbose=0).history["loss"] for _ in range(2)]
    assert losses[0] + losses[1] == expected


def test_an_own_history_is_used() -> None:
    history = History()
    trainer = Trainer(classifier(), SGD, callbacks=[history], strategy=ON_CPU)
    assert trainer.fit(class_batches(), epochs=2, verbose=0) is history
    assert len(history.history["loss"]) == 2


def test_a_generator_does_for_one_epoch_and_says_so() -> None:
    trainer = Trainer(classifier(), SGD, strategy=ON_CPU)
    with pytest.raises(ValueError, match=r"x is a generator, which can be gone through once, but 2 epochs"):
        trainer.fit((batch for batch in class_batches()), epochs=2, verbose=0)
    generator = (batch for batch in class_batches())
    trainer.fit(generator, verbose=0)
    with pytest.raises(ValueError, match=r"yielded no batch.*used up before"):
        trainer.fit(generator, verbose=0)
    with pytest.raises(ValueError, match=r"validation_data is a generator"):
        trainer.fit(class_batches(), epochs=2, validation_data=(batch for batch in class_batches()), verbose=0)


def test_errors_of_the_data_reach_the_caller() -> None:
    def failing() -> Iterator[Any]:
        yield class_batches()[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        Trainer(classifier(), SGD, strategy=ON_CPU).fit(failing(), verbose=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": nn.Linear}, TypeError, r"torch.nn.Module object, got <class"),
        ({"strategy": "dpp"}, ValueError, r"unknown strategy 'dpp'; the names are \['auto', 'single', "),
        ({"strategy": torch.device("cpu")}, TypeError, r"a Strategy object or one of \['auto', .*\], not device"),
        ({"metrics": "accuracy"}, TypeError, r"must be a list, such as \['accuracy'\]"),
        ({"metrics": ["acuracy"]}, ValueError, r"unknown metric 'acuracy'; the names are \['accuracy'"),
        ({"loss": "crossentropy!"}, ValueError, r"unknown loss 'crossentropy!'; the names are \['bce'"),
        ({"optimizer": "adamm"}, ValueError, r"unknown optimizer 'adamm'; the names are \['adadelta'"),
        ({"optimizer": SGD([nn.Parameter(torch.ones(1))]), "learning_rate": 1.0}, ValueError, "this one has its own"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Trainer(**{"model": classifier(), "strategy": ON_CPU, **arguments})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([(torch.zeros(4, 8),) * 4], r"a batch must be \(inputs, targets\).*got a tuple of 4 items \(several inputs"),
        ([(torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4).long())], r"got int64 of shape \(4,\).*several inputs"),
        ((torch.zeros(4, 8), torch.zeros(4)), r"got a tuple of tensor of shape \(4, 8\), tensor of shape \(4,\)"),
        ((np.zeros(2), np.zeros(2)), r"got a tuple of array of shape"),
        ({"x": 1}, r"got dict"),
        (3, r"got int"),
    ],
)
def test_wrong_data(data: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Trainer(classifier(), SGD, strategy=ON_CPU).fit(data, verbose=0)


def test_wrong_numbers() -> None:
    trainer = Trainer(classifier(), SGD, strategy=ON_CPU)
    with pytest.raises(ValueError, match="epochs must be at least 1"):
        trainer.fit(class_batches(), epochs=0)
    with pytest.raises(ValueError, match="verbose must be"):
        trainer.fit(class_batches(), verbose=3)
    with pytest.raises(ValueError, match="batches already"):
        trainer.predict(class_batches(), batch_size=2)
    with pytest.raises(ValueError, match="at least one row"):
        trainer.predict(torch.zeros(0, 8))
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        trainer.predict(torch.zeros(2, 8), batch_size=0)
    with pytest.raises(ValueError, match=r"x \(list\) yielded no batch"):
        trainer.fit([], verbose=0)
