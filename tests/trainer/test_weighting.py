"""Weighted rows, several losses, and padded batches against a loop by hand."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainer.helpers import DEVICES, ON_CPU, class_batches, classifier, strategy_on
from tests.trainer.test_fit_counts import counted
from tests.trainer.test_updates import assert_same_weights, by_hand, plain
from xlatrainer.trainer.losses import LOSSES, resolve_loss
from xlatrainer.trainer.trainer import Trainer
from xlatrainer.trainer.weighting import EVEN, RowWeights

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
WEIGHTS = torch.tensor([1.0, 0.0, 2.0, 0.5, 3.0])
IS_REAL = torch.tensor([True, True, True, False, False])

CASES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "cross_entropy": ("cross_entropy", torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])),
    "of shares": ("cross_entropy", torch.randn(5, 3), torch.randn(5, 3).softmax(1)),
    "of pixels": (F.cross_entropy, torch.randn(5, 3, 4), torch.randint(0, 3, (5, 4))),
    "ignored": (
        nn.CrossEntropyLoss(),
        torch.randn(5, 3, 2),
        torch.tensor([[0, -100], [2, 1], [1, 0], [1, 1], [0, -100]]),
    ),
    "by class": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=1),
        torch.randn(5, 3),
        torch.tensor([0, 2, 1, 1, 0]),
    ),
    "nll": (nn.NLLLoss(), torch.randn(5, 3).log_softmax(1), torch.tensor([0, 2, 1, 1, 0])),
    "sum": (nn.MSELoss(reduction="sum"), torch.randn(5, 2), torch.randn(5, 2)),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), torch.randn(5, 3).log_softmax(1), torch.randn(5, 3).softmax(1)),
    "rows": (lambda p, t: (p - t).abs().sum(1), torch.randn(5, 2), torch.randn(5, 2)),
    **{name: (name, torch.rand(5, 2), torch.rand(5, 2)) for name in LOSSES if name not in ("cross_entropy", "nll")},
}


def _of_rows(loss: Any, prediction: Tensor, target: Tensor, rows: slice) -> Tensor:
    value = resolve_loss(loss)(prediction[rows], target[rows])
    return value.mean() if value.dim() else value


@pytest.mark.parametrize("name", CASES)
def test_weights_of_one_change_nothing_and_padding_rows_are_not_there(name: str) -> None:
    loss, prediction, target = CASES[name]
    whole = _of_rows(loss, prediction, target, slice(None))
    weighted = resolve_loss(loss)
    torch.testing.assert_close(weighted(prediction, target, RowWeights(torch.ones(5))), whole)
    real = _of_rows(loss, prediction, target, slice(3))
    torch.testing.assert_close(weighted(prediction, target, RowWeights(None, IS_REAL)), real)
    broken = prediction.clone()
    broken[3:] = 0.0 if name == "bce" else float("nan")  # which torch refuses there
    torch.testing.assert_close(weighted(broken, target, RowWeights(torch.ones(5), IS_REAL)), real)


@pytest.mark.parametrize("name", ["cross_entropy", "of pixels", "mse", "rows", "huber"])
def test_a_weighted_loss_is_divided_by_the_number_of_rows(name: str) -> None:
    loss, prediction, target = CASES[name]
    rows = [_of_rows(loss, prediction, target, slice(i, i + 1)) for i in range(5)]
    for weights, real in ((RowWeights(WEIGHTS), 5), (RowWeights(WEIGHTS, IS_REAL), 3)):
        expected = sum(weight * row for weight, row in zip(WEIGHTS[:real], rows[:real], strict=True)) / real
        torch.testing.assert_close(resolve_loss(loss)(prediction, target, weights), expected)


def test_weights_for_each_position_and_what_cannot_be_weighed() -> None:
    loss, prediction, target = CASES["of pixels"]
    weight = torch.rand(5, 4)
    expected = (F.cross_entropy(prediction, target, reduction="none") * weight).mean()
    torch.testing.assert_close(resolve_loss(loss)(prediction, target, RowWeights(weight)), expected)
    with pytest.raises(ValueError, match=r"weights of shape \(4,\) do not go with a loss of shape \(5, 4\)"):
        resolve_loss(loss)(prediction, target, RowWeights(torch.ones(4)))
    with pytest.raises(ValueError, match="rows cannot be weighed in this loss, which returns their mean"):
        resolve_loss(lambda p, t: (p - t).mean())(torch.ones(5), torch.ones(5), RowWeights(WEIGHTS))

    class Output:
        loss = torch.tensor(1.0)

    with pytest.raises(ValueError, match="the model computes its loss itself"):
        resolve_loss(None)(Output(), None, RowWeights(WEIGHTS))
    assert resolve_loss(None)(Output(), None, EVEN) is Output.loss


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [1, 2])
def test_sample_and_class_weights_equal_a_loop_by_hand(device: str, steps: int) -> None:
    generator = torch.Generator().manual_seed(7)
    batches = [(x, y, torch.rand(len(y), generator=generator)) for x, y in class_batches(96, 16)]
    by_class = torch.tensor([1.0, 5.0, 0.5])
    model = plain()
    reference = copy.deepcopy(model)
    optimizer, losses = ADAM(reference.parameters()), []
    for _ in range(2):
        for first in range(0, len(batches), steps):
            x, y, weight = (torch.cat(column) for column in zip(*batches[first : first + steps], strict=True))
            optimizer.zero_grad()
            loss = (F.cross_entropy(reference(x), y, reduction="none") * weight * by_class[y]).sum() / len(y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    trainer = Trainer(model, ADAM, gradient_accumulation_steps=steps, strategy=strategy_on(device))
    history = trainer.fit(batches, epochs=2, class_weight={0: 1.0, 1: 5.0, 2: 0.5}, verbose=0).history
    half = len(losses) // 2
    assert history["loss"] == pytest.approx([np.mean(losses[:half]), np.mean(losses[half:])], abs=1e-5)
    assert_same_weights(model, reference)


class TwoOutputs(nn.Module):
    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.as_dict = as_dict
        self.shared, self.scores, self.value = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.shared(x).tanh()
        outputs = {"scores": self.scores(hidden), "value": self.value(hidden)}
        return outputs if self.as_dict else tuple(outputs.values())


@pytest.mark.parametrize("as_dict", [True, False])
def test_several_losses_and_their_weights(as_dict: bool) -> None:
    model = TwoOutputs(as_dict)
    reference = copy.deepcopy(model)
    optimizer = SGD(reference.parameters())
    batches: list[Any] = []
    sums = torch.zeros(3)
    for x, y in class_batches(96, 16):
        target = {"scores": y, "value": x[:, :1]}
        batches.append((x, target if as_dict else tuple(target.values())))
        output = reference(x)
        scores, value = output.values() if as_dict else output
        parts = F.cross_entropy(scores, y), F.mse_loss(value, x[:, :1])
        loss = parts[0] + 0.25 * parts[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums += torch.stack([loss, *parts]).detach()
    losses: Any = {"scores": "cross_entropy", "value": nn.MSELoss()} if as_dict else ["cross_entropy", nn.MSELoss()]
    weights: Any = {"value": 0.25} if as_dict else [1.0, 0.25]
    trainer = Trainer(model, SGD, loss=losses, loss_weights=weights)
    history = trainer.fit(batches, validation_data=batches, verbose=0).history
    names = ["loss", "scores_loss", "value_loss"] if as_dict else ["loss", "output_0_loss", "output_1_loss"]
    assert [history[name][0] for name in names] == pytest.approx((sums / 6).tolist(), abs=1e-5)
    assert_same_weights(model, reference)
    assert {f"val_{name}" for name in names} <= set(history)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_padded_last_batch_counts_for_its_real_rows(device: str, steps: int) -> None:
    model, held_out = plain(), class_batches(50, 16, seed=3)
    reference, expected = by_hand(model, ADAM, class_batches(100, 16 * steps), epochs=3)
    trainer = Trainer(
        model,
        ADAM,
        metrics=["accuracy"],
        pad_last_batch=True,
        gradient_accumulation_steps=steps,
        strategy=strategy_on(device),
    )
    history = trainer.fit(class_batches(100, 16), epochs=3, validation_data=held_out, verbose=0).history
    assert history["loss"] == pytest.approx(expected, abs=1e-5)
    assert_same_weights(model, reference)
    assert trainer.num_examples == 300
    x, y = (torch.cat(column) for column in zip(*held_out, strict=True))
    with torch.no_grad():
        scores = reference(x)
    assert history["val_loss"][-1] == pytest.approx(F.cross_entropy(scores, y).item(), abs=1e-5)
    assert history["val_accuracy"][-1] == pytest.approx((scores.argmax(1) == y).float().mean().item())
    predicted = trainer.predict(held_out, verbose=0)
    torch.testing.assert_close(predicted, scores, atol=1e-5, rtol=1e-5)


def test_padding_needs_one_program_for_all_batches() -> None:
    trainer = Trainer(plain(93), ADAM, metrics=["accuracy"], pad_last_batch=True)
    batches = class_batches(16 * 6 + 5, 16)
    with counted() as counts:
        trainer.fit(batches, epochs=3, validation_data=batches, verbose=0)
        trainer.predict(batches, verbose=0)
    assert counts.fallbacks == []
    assert counts["UncachedCompile"] == 3  # to train, to evaluate, to predict
    assert counts["Execute"] == 3 * (7 + 7) + 7
    with counted() as again:
        trainer.fit(batches, epochs=2, validation_data=batches, verbose=0)
    assert (again["UncachedCompile"], again["Execute"], again["Replay"]) == (0, 28, 28)
    assert again["TransferToDevice"] == 2 * 2 * (2 * 7 + 4)  # no mask


def test_padding_and_weights_and_several_steps_in_one_program() -> None:
    batches = [(x, y, y.float()) for x, y in class_batches(100, 16)]
    losses = []
    for padded in (False, True):
        trainer = Trainer(plain(), ADAM, pad_last_batch=padded, steps_per_execution=1 + 2 * padded)
        losses.append(trainer.fit(batches, epochs=3, verbose=0).history["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_an_own_step_must_leave_the_padding_out() -> None:
    class Own(Trainer):
        def training_step(self, batch: Any) -> Any:
            self.log("mean", batch[0].mean())
            return super().training_step(batch)

    class Wrong(Trainer):
        def training_step(self, batch: Any) -> Any:
            return F.cross_entropy(self.model(batch[0]), batch[1])

    Own(plain(), SGD, pad_last_batch=True, strategy=ON_CPU).fit(class_batches(), verbose=0)
    with pytest.raises(ValueError, match="pad_last_batch pads rows that training_step does not leave out"):
        Wrong(plain(), SGD, pad_last_batch=True, strategy=ON_CPU).fit(class_batches(), verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_weights": [1.0]}, "loss_weights is for a dict or list of losses"),
        ({"loss": ["mse"], "loss_weights": [1.0, 1.0]}, r"losses for \[0\] and weights for \[0, 1\]"),
        ({"loss": {"a": "mse"}, "loss_weights": [1.0]}, "must both be dicts"),
        ({"loss": {"a": "mse"}, "loss_weights": {"b": 1.0}}, "must both be dicts"),
        ({"loss": {}}, "must both be dicts"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(classifier(), strategy=ON_CPU, **arguments)


def test_outputs_without_a_loss_of_theirs() -> None:
    trainer = Trainer(classifier(), loss={"scores": "mse"}, strategy=ON_CPU)
    with pytest.raises(ValueError, match=r"a loss for 'scores'.*output is float32 of shape \(16, 3\)"):
        trainer.fit(class_batches(), verbose=0)
