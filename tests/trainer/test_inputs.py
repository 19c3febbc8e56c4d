"""What `fit`, `evaluate` and `predict` do with each kind of data and each argument about it."""

import copy
import gc
import itertools
from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.trainer.helpers import DEVICES, ON_CPU, class_batches, classifier, evaluated, hand_written, strategy_on
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.trainer.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.1)
X, Y = (torch.cat(column) for column in zip(*class_batches(), strict=True))  # (100, 8) and (100,)


def trainer_of(model: nn.Module | None = None, **arguments: Any) -> Trainer:
    return Trainer(classifier() if model is None else model, SGD, strategy=ON_CPU, **arguments)


@dataclass
class Sample:
    inputs: Tensor
    targets: Tensor


@dataclass
class Keywords:
    input: Tensor
    labels: Tensor


Named = namedtuple("Named", ["inputs", "targets"])


class Numbered:
    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> Any:
        return X[16 * number :][:16].numpy(), Y[16 * number :][:16].numpy()


KINDS: dict[str, tuple[Any, ...]] = {
    "tensors": (X, Y, 16),
    "arrays": (X.numpy(), Y.numpy(), 16),
    "arrays of float64": (X.double().numpy(), Y.numpy(), 16),
    "dict of inputs": ({"input": X}, Y, 16),
    "tuple of inputs": ((X,), Y, 16),
    "dict with labels": ({"input": X, "labels": Y}, None, 16),
    "dataset": (TensorDataset(X, Y), None, 16),
    "loader": (DataLoader(TensorDataset(X, Y), batch_size=16),),
    "numbered": (Numbered(),),
    "generator": ((batch for batch in class_batches()),),
    "dataclasses": ([Sample(x, y) for x, y in class_batches()],),
    "dataclasses of keywords": ([Keywords(x, y) for x, y in class_batches()],),
    "named tuples": ([Named(x, y) for x, y in class_batches()],),
    "dicts": ([{"input": x, "labels": y} for x, y in class_batches()],),
    "user dicts": ([UserDict(input=x, label=y) for x, y in class_batches()],),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_data_train_alike(kind: str) -> None:
    model = classifier()
    _, expected = hand_written(model, SGD, class_batches(), epochs=1)
    history = trainer_of(model, metrics=["accuracy"]).fit(*KINDS[kind], shuffle=False, verbose=0)
    assert history.history["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert history.history["accuracy"] == pytest.approx(expected["accuracy"])


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"generator"}))
def test_all_kinds_of_data_are_evaluated_and_predicted_alike(kind: str) -> None:
    model = classifier()
    trainer = trainer_of(model, metrics=["accuracy"])
    assert trainer.evaluate(*KINDS[kind], verbose=0) == pytest.approx(evaluated(model, class_batches()), abs=1e-6)
    x, y, *size = (*KINDS[kind], None)[:3] if len(KINDS[kind]) > 1 else (*KINDS[kind], None)
    model.eval()
    with torch.no_grad():
        scores = model(X)
    predicted = trainer.predict(x, *size, verbose=0)
    torch.testing.assert_close(predicted, scores)


def test_several_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(torch.stack([a, b], 1)).squeeze(1)

    a, b, y = torch.randn(3, 20)
    losses = []
    for x in ((a, b), [a, b.numpy()], {"b": b, "a": a}):
        torch.manual_seed(0)
        trainer = trainer_of(Sum())
        losses.append(trainer.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"])
        assert trainer.predict(x if isinstance(x, dict) else tuple(x), verbose=0).shape == (20,)
    assert losses == [losses[0]] * 3


def test_shuffled_rows_are_a_new_order_each_epoch() -> None:
    seen: list[list[float]] = []

    class Note(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.flatten().tolist())
            return x * self.weight

    rows = torch.arange(12.0).reshape(12, 1)
    trainer_of(Note()).fit(rows, rows, batch_size=6, epochs=2, verbose=0)
    epochs = [seen[0] + seen[1], seen[2] + seen[3]]
    assert [sorted(epoch) for epoch in epochs] == [rows.flatten().tolist()] * 2
    assert epochs[0] != epochs[1]


def test_a_split_is_the_last_rows_before_shuffling() -> None:
    model = classifier()
    first = [(x, y) for x, y in zip(X[:80].split(16), Y[:80].split(16), strict=True)]
    reference, expected = hand_written(model, SGD, first, epochs=2)
    history = trainer_of(model).fit(X, Y, 16, 2, 0, validation_split=0.2, shuffle=False).history
    assert history["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert history["val_loss"][-1] == pytest.approx(evaluated(reference, [(X[80:], Y[80:])])["loss"], abs=1e-6)
    with pytest.raises(ValueError, match="validation_split or validation_data, not both"):
        trainer_of().fit(X, Y, validation_split=0.2, validation_data=(X, Y), verbose=0)


@pytest.mark.parametrize(
    ("data", "batches"),
    [
        ((X, Y), 7),
        ((X.numpy(), Y.numpy()), 7),
        ((X, Y, torch.ones(100)), 7),
        (TensorDataset(X, Y), 7),
        (DataLoader(TensorDataset(X, Y), batch_size=50), 2),
        ([(X, Y)], 1),
        ([(X, Y), (X, Y)], 2),
    ],
)
def test_validation_data_in_each_form(data: Any, batches: int) -> None:
    """Its batch size is that of the training, where it has none of its own."""
    model, seen = classifier(), []
    note = LambdaCallback(on_test_batch_end=lambda batch, logs: seen.append(batch))
    history = trainer_of(model).fit(X, Y, 16, validation_data=data, callbacks=[note], verbose=0).history
    assert history["val_loss"] == [pytest.approx(evaluated(model, class_batches())["loss"], abs=1e-6)]
    assert len(seen) == batches
    if isinstance(data, tuple):
        seen.clear()
        trainer_of().fit(
            X, Y, 16, validation_data=data, validation_batch_size=50, callbacks=[note], verbose=0, validation_steps=1
        )
        assert seen == [0]


def test_class_weights_are_sample_weights() -> None:
    weights = torch.tensor([0.5, 2.0, 1.0])
    losses = [
        trainer_of().fit(X, Y, 16, 2, 0, shuffle=False, **arguments).history["loss"]
        for arguments in ({"class_weight": {0: 0.5, 1: 2.0}}, {"sample_weight": weights[Y]}, {})
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [False, True])
def test_weighted_metrics_divide_by_the_sum_of_weights(device: str, padded: bool) -> None:
    """The last batch is short, and may be padded."""
    weight = torch.rand(100, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    model = classifier()
    trainer = Trainer(
        copy.deepcopy(model),
        SGD,
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
        pad_last_batch=padded,
        strategy=strategy_on(device),
    )
    values = trainer.evaluate(X, Y, 16, sample_weight=weight, verbose=0)
    model.eval()
    with torch.no_grad():
        scores = model(X)
    right = (scores.argmax(1) == Y).float()
    losses = nn.functional.cross_entropy(scores, Y, reduction="none")
    assert values == pytest.approx(
        {
            "loss": (losses * weight).mean().item(),
            "accuracy": right.mean().item(),
            "weighted_accuracy": ((right * weight).sum() / weight.sum()).item(),
        },
        abs=1e-5,
    )


def test_steps_per_epoch_go_on_through_the_data() -> None:
    seen: list[float] = []
    batches = [(torch.full((2, 1), float(number)), torch.zeros(2, 1)) for number in range(5)]

    class Note(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x[0].item())
            return x * self.weight

    history = trainer_of(Note()).fit(batches, epochs=3, steps_per_epoch=2, verbose=0)
    assert (seen, history.params["steps"]) == ([0, 1, 2, 3, 4, 0], 2)


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_not_one_batch_more_is_drawn_than_is_used(steps_per_execution: int) -> None:
    drawn: list[int] = []

    def batches() -> Iterator[Any]:
        for number in itertools.count():
            drawn.append(number)
            yield X[:8], Y[:8]

    trainer = trainer_of(steps_per_execution=steps_per_execution)
    trainer.fit(batches(), steps_per_epoch=7, max_steps=6, verbose=0)
    assert (len(drawn), trainer.step) == (6, 6)
    generator = batches()
    drawn.clear()
    trainer.fit(generator, epochs=2, steps_per_epoch=3, validation_data=generator, validation_steps=2, verbose=0)
    assert len(drawn) == 2 * (3 + 2)


def test_an_iterator_that_runs_dry_ends_the_training() -> None:
    trainer = trainer_of()
    with pytest.warns(UserWarning, match="^x ran out after 1 of the 3 batches that steps_per_epoch asks for"):
        history = trainer.fit(iter(class_batches()), epochs=9, steps_per_epoch=3, verbose=0)
    assert (history.epoch, trainer.step) == ([0, 1, 2], 7)


def test_an_endless_iterator_says_so_before_the_training() -> None:
    began: list[Any] = []
    note = LambdaCallback(on_train_begin=lambda logs: began.append(logs))
    with pytest.raises(ValueError, match=r"x \(cycle\) never ends: say how many batches, steps_per_epoch=..."):
        trainer_of().fit(itertools.cycle(class_batches()), callbacks=[note], verbose=0)
    with pytest.raises(ValueError, match="validation_steps="):
        trainer_of().fit(X, Y, validation_data=itertools.cycle(class_batches()), callbacks=[note], verbose=0)
    assert not began
    assert len(trainer_of().fit(itertools.cycle(class_batches()), epochs=2, steps_per_epoch=9, verbose=0).epoch) == 2


def test_a_validation_generator_goes_on_and_others_start_anew() -> None:
    first, second = class_batches(64)[:2], class_batches(64)[2:]
    values = []
    for data in (iter(first + second), first + second):
        torch.manual_seed(0)
        trainer = Trainer(nn.Linear(8, 3), "sgd", learning_rate=0.0, strategy=ON_CPU)
        history = trainer.fit([(X, Y)], epochs=2, validation_data=data, validation_steps=2, verbose=0)
        values.append(history.history["val_loss"])
    assert values[1][0] == values[1][1] == values[0][0] != values[0][1]
    with pytest.warns(UserWarning, match="^validation_data ran out after 2 batches: there is no epoch 2$"):
        history = trainer_of().fit([(X, Y)], epochs=3, validation_data=iter(first), validation_steps=2, verbose=0)
    assert (len(history.history["val_loss"]), len(history.history["loss"])) == (1, 3)


@pytest.mark.parametrize(("freq", "epochs"), [(1, [0, 1, 2, 3]), (2, [1, 3]), ([1, 4], [0, 3])])
def test_how_often_is_validated(freq: Any, epochs: list[int]) -> None:
    validated: list[int] = []
    note = LambdaCallback(on_epoch_end=lambda epoch, logs: validated.append(epoch) if "val_loss" in logs else None)
    trainer_of().fit(X, Y, 50, 4, 0, [note], validation_data=(X, Y), validation_freq=freq)
    assert validated == epochs


@pytest.mark.parametrize(("freq", "error"), [(0, ValueError), (0.5, TypeError), ("epoch", TypeError)])
def test_wrong_frequencies(freq: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="validation_freq must be"):
        trainer_of().fit(X, Y, validation_data=(X, Y), validation_freq=freq, verbose=0)


def test_single_batches_take_the_same_forms() -> None:
    trainer = trainer_of()
    expected = dict(trainer.test_on_batch(X, Y))
    for batch in ((X.double().numpy(), Y.numpy()), (Sample(X, Y),), ({"input": X, "labels": Y},), ((X, Y),)):
        assert dict(trainer.test_on_batch(*batch)) == expected
    for inputs in (X.double().numpy(), {"input": X}, (X, Y)):
        assert torch.equal(trainer.predict_on_batch(inputs), trainer.predict_on_batch(X))


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == 40:
            raise OSError("the disk is gone")
        return X[index], Y[index]


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_dataset_reaches_the_caller(workers: int) -> None:
    loader = DataLoader(Failing(), batch_size=8, num_workers=workers)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        trainer_of().fit(loader, verbose=0)
    shown = str(caught.value) if workers else str(caught.traceback[-1])
    assert "__getitem__" in shown
    del caught
    gc.collect()  # its frames held the workers


def test_an_iterable_may_fail_in_its_own_way() -> None:
    def failing() -> Iterator[Any]:
        yield class_batches()[0]
        raise KeyError("a key of mine")

    with pytest.raises(KeyError, match="a key of mine") as caught:
        trainer_of().fit(failing(), verbose=0)
    assert caught.traceback[-1].name == "failing"
