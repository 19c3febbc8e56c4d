"""Steps that a subclass or the model defines: what they may return, several optimizers, logged values, and replay."""

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainer.helpers import ON_CPU, class_batches, classifier, hand_written, strategy_on
from tests.trainer.test_fit_counts import counted
from xlatrainer.trainer.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Own(Trainer):
    """Returns what `form` says, of the same loss."""

    form = "loss"

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        scores = self.model(inputs)
        loss = F.cross_entropy(scores, targets)
        self.log("largest", scores.max())
        if self.form == "dict":
            return {"loss": loss, "prediction": scores, "target": targets, "twice": 2 * loss}
        if self.form == "none":
            self.minimize(loss)
            self.log("own_loss", loss)
            return None
        return loss


@pytest.mark.parametrize(("device", "form"), [("cpu", "loss"), ("cpu", "dict"), ("cpu", "none"), ("xla", "dict")])
def test_what_a_step_returns(device: str, form: str) -> None:
    model, batches = classifier(), class_batches()
    reference, expected = hand_written(model, SGD, batches, epochs=2)
    metrics = ["accuracy"] if form == "dict" else []
    trainer = Own(model, SGD, metrics=metrics, strategy=strategy_on(device))
    trainer.form = form
    history = trainer.fit(batches, epochs=2, verbose=0).history
    name = "own_loss" if form == "none" else "loss"
    assert history[name] == pytest.approx(expected["loss"], abs=1e-5)
    assert ("loss" in history) == (form != "none")
    if form == "dict":
        assert history["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
        assert history["twice"] == pytest.approx([2 * loss for loss in expected["loss"]], abs=2e-5)
    torch.testing.assert_close(model[0].weight.cpu(), reference[0].weight, atol=1e-5, rtol=1e-5)
    assert trainer.step == 14


def test_logged_values_are_means_over_examples_and_those_of_validation_have_their_names() -> None:
    class Logging(Trainer):
        def training_step(self, batch: Any) -> Any:
            self.log("first", batch[0][:, 0].mean())
            return super().training_step(batch)

        def validation_step(self, batch: Any) -> Any:
            self.log("first", batch[0][:, 0].mean())
            self.log("constant", 3)
            return super().validation_step(batch)

    batches, held_out = class_batches(), class_batches(rows=50, seed=3)
    trainer = Logging(classifier(), SGD)
    history = trainer.fit(batches, epochs=2, validation_data=held_out, verbose=0).history
    expected = torch.cat([x for x, _ in batches])[:, 0].mean().item()
    assert history["first"] == pytest.approx([expected] * 2, abs=1e-6)
    expected = torch.cat([x for x, _ in held_out])[:, 0].mean().item()
    assert history["val_first"] == pytest.approx([expected] * 2, abs=1e-6)
    assert history["val_constant"] == [3.0, 3.0]
    assert "constant" not in history


def test_a_model_defines_its_steps() -> None:
    class WithSteps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = classifier()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs)

        def training_step(self, batch: Any, trainer: Trainer) -> Tensor:
            inputs, targets = batch
            trainer.log("rows", len(inputs))
            return F.cross_entropy(self(inputs), targets)

        def validation_step(self, batch: Any) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self(batch[0]), batch[1]), "zero": torch.zeros(())}

        def predict_step(self, batch: Any) -> Tensor:
            return self(batch).argmax(1)

    model, batches = WithSteps(), class_batches(96)
    _, expected = hand_written(model, SGD, batches, epochs=2)
    trainer = Trainer(model, SGD, strategy=ON_CPU)
    history = trainer.fit(batches, epochs=2, validation_data=batches, verbose=0).history
    assert history["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert history["rows"] == [16.0, 16.0]
    assert history["val_zero"] == [0.0, 0.0]
    assert trainer.predict(torch.zeros(5, 8), verbose=0).shape == (5,)


def test_the_output_of_a_model_with_a_loss_may_be_returned() -> None:
    class Output(OrderedDict[str, Tensor]):
        def __getattr__(self, name: str) -> Tensor:
            try:
                return self[name]
            except KeyError:
                raise AttributeError(name) from None

    class Returning(Trainer):
        def training_step(self, batch: Any) -> Any:
            scores = self.model(batch["x"])
            return Output(loss=F.cross_entropy(scores, batch["labels"]), logits=scores)

    model = classifier()
    dicts = [{"x": x, "labels": y} for x, y in class_batches()]
    _, expected = hand_written(model, SGD, class_batches(), epochs=1)
    history = Returning(model, SGD, metrics=["accuracy"], strategy=ON_CPU).fit(dicts, verbose=0).history
    assert history["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert history["accuracy"] == pytest.approx(expected["accuracy"])


class Pair(nn.Module):
    """A generator of points and a discriminator of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))


def _losses(model: Pair, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
    ones, zeros = torch.ones(len(real), 1, device=real.device), torch.zeros(len(real), 1, device=real.device)
    score = F.binary_cross_entropy_with_logits
    return score(model.discriminator(real), ones) + score(model.discriminator(fake.detach()), zeros), ones


class GAN(Trainer):
    def training_step(self, batch: Any) -> None:
        noise, real = batch
        fake = self.model.generator(noise)
        d_loss, ones = _losses(self.model, real, fake)
        self.minimize(d_loss, self.optimizers["discriminator"])
        g_loss = F.binary_cross_entropy_with_logits(self.model.discriminator(fake), ones)
        self.minimize(g_loss, self.optimizers["generator"])
        self.log("d_loss", d_loss)
        self.log("g_loss", g_loss)


def _optimizers(model: Pair) -> dict[str, torch.optim.Optimizer]:
    return {
        "generator": torch.optim.Adam(model.generator.parameters(), lr=0.01, betas=(0.5, 0.9)),
        "discriminator": torch.optim.SGD(model.discriminator.parameters(), lr=0.1),
    }


@pytest.mark.parametrize(("device", "largest"), [("cpu", None), ("cpu", 0.1), ("xla", 0.1)])
def test_a_gan_with_two_optimizers(device: str, largest: float | None) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(16, 4, generator=generator), 3 + torch.randn(16, 2, generator=generator)) for _ in range(8)]
    model = Pair()
    reference = copy.deepcopy(model)
    optimizers = _optimizers(reference)
    expected: dict[str, list[float]] = {"d_loss": [], "g_loss": []}
    for _ in range(2):
        sums = {"d_loss": 0.0, "g_loss": 0.0}
        for noise, real in batches:
            fake = reference.generator(noise)
            d_loss, ones = _losses(reference, real, fake)
            for name, loss in (("discriminator", d_loss), ("generator", None)):
                if loss is None:
                    loss = F.binary_cross_entropy_with_logits(reference.discriminator(fake), ones)
                    sums["g_loss"] += loss.item()
                optimizers[name].zero_grad()
                part = list(getattr(reference, name).parameters())
                loss.backward(inputs=part)
                if largest is not None:
                    nn.utils.clip_grad_norm_(part, largest)
                optimizers[name].step()
            sums["d_loss"] += d_loss.item()
        for name, value in sums.items():
            expected[name].append(value / len(batches))
    trainer = GAN(model, _optimizers(model), global_clipnorm=largest, strategy=strategy_on(device))
    with counted() as counts:
        history = trainer.fit(batches, epochs=2, verbose=0).history
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=1e-5)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), value, atol=1e-5, rtol=1e-5)
    assert ("generator_grad_norm" in history) == (largest is not None)
    assert trainer.optimizer is trainer.optimizers["generator"]
    optimizers_saved = {"optimizer.generator", "optimizer.discriminator"}
    assert set(trainer.stateful_parts()) == {*optimizers_saved, "callback.History"}
    if device == "xla":
        assert counts["Execute"] == 16
        assert counts["UncachedCompile"] == 1
        assert counts["Replay"] >= 12


def test_logging_keeps_one_program_and_replay() -> None:
    trainer = Own(classifier(width=71), SGD)
    with counted() as first:
        trainer.fit(class_batches(96), verbose=0)
    assert (first["Execute"], first["UncachedCompile"]) == (6, 1)
    with counted() as again:
        trainer.fit(class_batches(96), epochs=2, verbose=0)
    assert (again["Execute"], again["UncachedCompile"], again["Replay"]) == (12, 0, 12)
    assert again["TransferFromDevice"] == 2 * 2


def test_a_changed_attribute_or_counter_runs_the_python_again() -> None:
    class Scaled(Trainer):
        scale = 1.0

        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch).loss
            self.log("scale", self.scale)
            return loss * self.scale if self.epoch < 4 else loss * 0

    trainer = Scaled(classifier(), SGD)
    values = []
    for scale in (1.0, 0.5):
        trainer.scale = scale
        values += trainer.fit(class_batches(96), epochs=2, verbose=0).history["scale"]
    assert values == [1.0, 1.0, 0.5, 0.5]
    history = trainer.fit(class_batches(96), initial_epoch=4, epochs=6, verbose=0).history
    trainer.epoch = 4
    assert trainer.fit(class_batches(96), initial_epoch=4, epochs=5, verbose=0).history["loss"] == [0.0]
    assert history["loss"][0] > 0


def test_a_step_that_reads_the_learning_rate_sees_it_change() -> None:
    class Reading(Trainer):
        def training_step(self, batch: Any) -> Any:
            self.log("rate", self.learning_rate)
            return super().training_step(batch)

    trainer = Reading(classifier(), "sgd", learning_rate=0.5, scheduler=halving)
    history = trainer.fit(class_batches(96), epochs=3, verbose=0).history
    assert history["rate"] == history["learning_rate"] == [0.5, 0.25, 0.125]


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_state_of_the_subclass_goes_through_replay() -> None:
    class Counting(Trainer):
        total: Tensor

        def training_step(self, batch: Any) -> Any:
            self.total = self.total + len(batch[0])
            return super().training_step(batch)

    trainer = Counting(classifier(), SGD)
    trainer.total = torch.zeros((), device="xla")
    trainer.fit(class_batches(96), epochs=3, verbose=0)
    assert trainer.total.item() == 3 * 96


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda loss: "loss", TypeError, "training_step must return a loss of shape"),
        (lambda loss: loss.expand(2), ValueError, r"must have shape \(\)"),
        (lambda loss: {"loss": loss, "scores": loss.expand(2)}, TypeError, "'scores' to log"),
        (lambda loss: {"loss": loss, "accuracy": loss}, ValueError, "metric of that name"),
        (lambda loss: loss, ValueError, "'accuracy' needs predictions"),
    ],
)
def test_wrong_results(returned: Any, error: type[Exception], message: str) -> None:
    class Wrong(Trainer):
        def training_step(self, batch: Any) -> Any:
            return returned(super().training_step(batch).loss)

    with pytest.raises(error, match=message):
        Wrong(classifier(), SGD, metrics=["accuracy"], strategy=ON_CPU).fit(class_batches(), verbose=0)


def test_wrong_uses() -> None:
    trainer = Trainer(classifier(), SGD, strategy=ON_CPU)
    with pytest.raises(RuntimeError, match=r"log\('x'\) outside of a step"):
        trainer.log("x", 1.0)

    class Lightning(nn.Linear):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.zeros(())

    with pytest.raises(TypeError, match=r"must take \(batch\) or \(batch, trainer\)"):
        Trainer(Lightning(8, 3), SGD, strategy=ON_CPU).fit(class_batches(), verbose=0)
    with pytest.raises(TypeError, match="there are several optimizers"):
        _several_with_a_loss()
    with pytest.raises(TypeError, match="dict of optimizers must hold optimizers"):
        Trainer(classifier(), {"a": SGD}, strategy=ON_CPU)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="dict of optimizers is empty"):
        Trainer(classifier(), {}, strategy=ON_CPU)


def _several_with_a_loss() -> None:
    model = classifier()
    optimizers = {"a": SGD(model[0].parameters()), "b": SGD(model[3].parameters())}
    Own(model, optimizers, strategy=ON_CPU).fit(class_batches(), verbose=0)


def test_single_batches_use_the_programs_of_fit() -> None:
    trainer = Trainer(classifier(width=72), SGD, metrics=["accuracy"])
    batches = class_batches(96)
    trainer.fit(batches, verbose=0)
    trainer.evaluate(batches, verbose=0)
    other = Trainer(classifier(width=72), SGD, metrics=["accuracy"], strategy=ON_CPU)
    other.fit(batches, verbose=0)
    trainer.predict_on_batch(batches[0][0])
    with counted() as counts:
        logs = trainer.train_on_batch(*batches[0])
        evaluation = trainer.test_on_batch(*batches[1])
        predictions = trainer.predict_on_batch(batches[0][0])
    assert (counts["UncachedCompile"], counts["Execute"], counts["TransferFromDevice"]) == (0, 3, 0)
    assert dict(logs) == pytest.approx(dict(other.train_on_batch(*batches[0])), abs=1e-5)
    assert dict(evaluation) == pytest.approx(dict(other.test_on_batch(batches[1])), abs=1e-5)
    assert predictions.device.type == "xla"
    torch.testing.assert_close(predictions.cpu(), other.predict_on_batch(batches[0]), atol=1e-5, rtol=1e-5)
    assert trainer.step == 7
