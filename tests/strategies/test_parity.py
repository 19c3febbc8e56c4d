"""Every strategy trains the same: the losses of one device within float tolerance, from the same weights."""

from functools import cache
from typing import Any

import pytest
import torch

import xlatrainer as xla
from tests.strategies.models import batches, model_of, strategy_of, trained
from xlatrainer.strategies import DDPStrategy, FSDPStrategy
from xlatrainer.trainer.trainer import Trainer

SEVERAL = ("ddp", "ddp2", "ddp4", "fsdp", "fsdp2", "fsdp_kept", "hsdp", "hsdp4", "zero1", "zero2", "tensor_parallel")


@cache
def alone(kind: str) -> tuple[float, ...]:
    return tuple(trained(kind, "single")[1])


# Each is compiled for eight devices, which takes seconds: `make test-sharding` runs all of them.
OFTEN = {
    ("cnn", "ddp"),
    ("cnn", "fsdp"),
    ("gpt", "fsdp"),
    ("gpt", "hsdp"),
    ("gpt", "zero2"),
    ("gpt", "tensor_parallel"),
}
ALL = [
    pytest.param(kind, name, marks=() if (kind, name) in OFTEN else pytest.mark.slow)
    for kind in ("cnn", "gpt")
    for name in SEVERAL
]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_the_losses_of_one_device(kind: str, name: str) -> None:
    expected = alone(kind)
    before = {counter: xla.counters.value(counter) for counter in ("UncachedCompile", "Execute", "Replay", "MarkStep")}
    trainer, losses = trained(kind, strategy_of(name, kind))
    assert losses == pytest.approx(expected, rel=1e-5)
    change = {counter: xla.counters.value(counter) - count for counter, count in before.items()}
    assert change["UncachedCompile"] <= 1  # a program that another strategy of the same shardings has made is found
    assert change["Execute"] == 20
    assert change["Replay"] == 18
    assert trainer.num_examples == 20 * 16


# What is no matter of the model is shown with one that is soon compiled; `make test-sharding` trains the GPT so, too.
EITHER = [
    ("bigram", "fsdp"),
    *(pytest.param("gpt", strategy, marks=pytest.mark.slow) for strategy in ("ddp", "fsdp")),
]


@pytest.mark.parametrize(("kind", "strategy"), EITHER)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 4, "use_ema": True, "global_clipnorm": 0.1},
        {"steps_per_execution": 5},
        {"precision": "bf16-mixed"},
        pytest.param({"optimizer": "sgd", "learning_rate": 0.1}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "adafactor"}, marks=pytest.mark.slow),  # whose state is no copy of the parameter
    ],
    ids=lambda options: "_".join(options),
)
def test_with_what_else_a_trainer_does(options: dict[str, Any], kind: str, strategy: str) -> None:
    one, expected = trained(kind, "single", **options)
    several, losses = trained(kind, strategy, **options)
    rel = 1e-3 if "precision" in options else 1e-5
    assert losses == pytest.approx(expected, rel=rel)
    assert several.evaluate(batches(kind, 2), verbose=0)["loss"] == pytest.approx(
        one.evaluate(batches(kind, 2), verbose=0)["loss"], rel=rel
    )


@pytest.mark.parametrize(("kind", "strategy"), EITHER)
def test_rows_that_the_devices_do_not_divide(kind: str, strategy: str) -> None:
    data = batches(kind, 3) + batches(kind, 1, rows=5)
    one, expected = trained(kind, "single", data)
    several, losses = trained(kind, strategy, data)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert several.num_examples == one.num_examples == 53
    assert several.evaluate(data, verbose=0)["loss"] == pytest.approx(one.evaluate(data, verbose=0)["loss"], rel=1e-5)
    predicted = several.predict([inputs for inputs, _ in data], verbose=0)
    assert predicted.shape[0] == 53
    assert torch.allclose(predicted, one.predict([inputs for inputs, _ in data], verbose=0), atol=1e-4)


def test_a_loss_of_ones_own_says_that_rows_are_missing() -> None:
    trainer = Trainer(model_of("gpt"), loss=lambda p, t: torch.nn.functional.cross_entropy(p, t).mean(), strategy="ddp")
    with pytest.raises(ValueError, match="rows cannot be weighed in this loss"):
        trainer.fit(batches("gpt", 1, rows=5), verbose=0)


def test_frozen_and_tied_parameters() -> None:
    def frozen(kind: str) -> torch.nn.Module:
        model = model_of(kind)
        model.get_submodule("blocks.0").requires_grad_(False)
        return model

    results = []
    for strategy in ("single", "fsdp"):
        xla.manual_seed(7)
        model = frozen("gpt")
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trainer = Trainer(model, loss="cross_entropy", strategy=strategy)
        results.append(trainer.fit(batches("gpt"), epochs=2, verbose=0).history["loss"])
        assert trainer.model.head.weight is trainer.model.token.weight
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter.cpu(), before[name]) == name.startswith("blocks.0"), name
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_one_trainer_after_the_other() -> None:
    """Each finds its own devices again."""
    several, losses = trained("cnn", "fsdp")
    one, expected = trained("cnn", "single")
    for trainer in (several, one):
        xla.manual_seed(9)
        trainer.fit(batches("cnn"), verbose=0)
    assert len(losses) == 40
    assert losses == pytest.approx(expected, rel=1e-5)
    mine, theirs = (trainer.evaluate(batches("cnn", 2), verbose=0) for trainer in (several, one))
    # Biases in front of a batch norm: their gradients are rounding alone, of which Adam makes whole steps. Training
    # does not see them; evaluation does, as far as the running means lag behind.
    assert mine == pytest.approx(theirs, rel=1e-4)


def test_a_model_goes_on_under_another_strategy() -> None:
    trainer, _ = trained("gpt", "fsdp")
    expected = trainer.evaluate(batches("gpt", 2), verbose=0)["loss"]
    other = Trainer(trainer.model, loss="cross_entropy", strategy=DDPStrategy())
    assert other.evaluate(batches("gpt", 2), verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)
    for strategy in (FSDPStrategy(4), "single", "fsdp", "single"):
        again = Trainer(trainer.model, loss="cross_entropy", strategy=strategy)
        assert again.evaluate(batches("gpt", 2), verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)
    smaller = Trainer(model_of("gpt"), loss="cross_entropy", strategy=FSDPStrategy(2))
    smaller.model.load_state_dict({name: value.cpu() for name, value in trainer.model.state_dict().items()})
    assert smaller.evaluate(batches("gpt", 2), verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)
