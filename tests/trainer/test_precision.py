"""Precisions against a loop by hand, the scale of losses against torch's, and what they cost."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.trainer.helpers import ON_CPU, class_batches, strategy_on
from tests.trainer.test_fit_counts import counted
from tests.trainer.test_updates import assert_same_weights, plain
from xlatrainer.callbacks.lambda_callback import LambdaCallback
from xlatrainer.trainer.precision import LossScale, Precision
from xlatrainer.trainer.trainer import Trainer

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
DTYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def mixed_by_hand(
    model: nn.Module, make_optimizer: Any, dtype: torch.dtype, epochs: int, largest: float | None = None
) -> tuple[nn.Module, list[float]]:
    """Trained with torch's autocast and, in float16, its scaler; on the CPU."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, growth_interval=4)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for inputs, targets in class_batches(96):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                scores = model(inputs)
            loss = F.cross_entropy(scores.float(), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if largest is not None:
                nn.utils.clip_grad_norm_(model.parameters(), largest)
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        losses.append(total / 6)
    return model, losses


@pytest.mark.parametrize(
    ("device", "name", "make_optimizer"),
    [*(("cpu", name, make) for name in DTYPES for make in (SGD, ADAM)), *(("xla", name, ADAM) for name in DTYPES)],
)
def test_a_mixed_precision_equals_a_loop_by_hand(device: str, name: str, make_optimizer: Any) -> None:
    """On the CPU the same to float32's rounding; on `xla` to that of the lower precision's products."""
    model = plain()
    reference, losses = mixed_by_hand(model, make_optimizer, DTYPES[name], epochs=3, largest=0.5)
    trainer = Trainer(model, make_optimizer, precision=name, global_clipnorm=0.5, strategy=strategy_on(device))
    if trainer.loss_scale is not None:
        trainer.loss_scale.growth_interval = 4
    history = trainer.fit(class_batches(96), epochs=3, verbose=0).history
    assert history["loss"] == pytest.approx(losses, abs=1e-5 if device == "cpu" else 2e-3)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    if device == "cpu":
        assert_same_weights(model, reference)
    assert all(norm < 10 for norm in history["grad_norm"])


@pytest.mark.parametrize(("device", "make_optimizer"), [("cpu", SGD), ("cpu", ADAM), ("xla", ADAM)])
def test_an_update_that_overflows_is_left_out_and_the_scale_moves_as_torchs(device: str, make_optimizer: Any) -> None:
    """A scale far too high at first: the first updates overflow in float16."""
    model = plain()
    trainer = Trainer(model, make_optimizer, precision="fp16-mixed", strategy=strategy_on(device))
    assert trainer.loss_scale is not None
    trainer.loss_scale.growth_interval = 3
    trainer.loss_scale.load_state_dict({"scale": torch.tensor(2.0**24), "made": torch.tensor(0, dtype=torch.int32)})
    before = copy.deepcopy(model.state_dict())
    scales: list[float] = []
    changed: list[bool] = []

    def note(batch: int, logs: Any) -> None:
        assert trainer.loss_scale is not None
        scales.append(trainer.loss_scale.scale.item())
        changed.append(not torch.equal(model.state_dict()["0.weight"], before["0.weight"]))

    trainer.fit(class_batches(16 * 16), callbacks=[LambdaCallback(on_train_batch_end=note)], verbose=0)
    skipped = changed.index(True)
    assert skipped >= 2
    assert scales[:skipped] == [2.0**24 / 2**n for n in range(1, skipped + 1)]
    found = torch.isfinite(torch.tensor(scales)).all() and torch.isfinite(model.state_dict()["0.weight"]).all()
    assert found
    # From here on it is torch's own rule: what made each next scale?
    scaler = torch.tensor(scales[skipped - 1])
    tracker = torch.tensor(0, dtype=torch.int32)
    for scale in scales[skipped:]:
        overflow = torch.tensor(float(scale < scaler.item()))
        torch._amp_update_scale_(scaler, tracker, overflow, 2.0, 0.5, 3)
        assert scaler.item() == scale
    if make_optimizer is ADAM:
        made = sum(now >= then for then, now in zip([2.0**24, *scales], scales, strict=False))
        state = trainer.optimizer.state[model.get_parameter("0.weight")]
        assert state["step"].item() == made  # the bias correction counts the updates that were made
        assert state["step"].device.type == device


@pytest.mark.parametrize(
    ("device", "name"), [("cpu", "bf16-mixed"), ("cpu", "fp16-mixed"), ("cpu", "bf16"), ("xla", "bf16")]
)
def test_metrics_predictions_and_losses_are_float32(device: str, name: str) -> None:
    model = plain()
    trainer = Trainer(model, SGD, metrics=["accuracy"], precision=name, strategy=strategy_on(device))
    history = trainer.fit(class_batches(96), epochs=4, validation_data=class_batches(96), verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert history["val_accuracy"][-1] > 0.6
    assert trainer.predict(class_batches()[0][0], verbose=0).dtype == torch.float32
    assert model.get_parameter("0.weight").dtype == (torch.bfloat16 if name == "bf16" else torch.float32)
    logs = trainer.train_on_batch(*class_batches()[0])
    assert logs._values["loss"].dtype == torch.float32  # type: ignore[union-attr]


def test_a_bfloat16_model_equals_a_loop_by_hand() -> None:
    model = plain()
    reference = copy.deepcopy(model).to(torch.bfloat16)
    optimizer = SGD(reference.parameters())
    for inputs, targets in class_batches(96):
        optimizer.zero_grad()
        F.cross_entropy(reference(inputs.bfloat16()).float(), targets).backward()
        optimizer.step()
    Trainer(model, SGD(model.parameters()), precision="bf16-true", strategy=ON_CPU).fit(class_batches(96), verbose=0)
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_an_own_step_gets_its_batch_as_it_was_and_its_inputs_in_bfloat16() -> None:
    class Own(Trainer):
        def training_step(self, batch: Any) -> Any:
            inputs, targets = batch
            assert inputs.dtype == torch.bfloat16
            return F.cross_entropy(self.model(inputs), targets)

    history = Own(plain(), SGD, precision="bf16", strategy=ON_CPU).fit(class_batches(96), epochs=4, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.parametrize(("name", "steps"), [("bf16-mixed", 1), ("fp16-mixed", 2)])
def test_a_precision_keeps_the_counts(name: str, steps: int) -> None:
    trainer = Trainer(
        plain((101 if name == "bf16-mixed" else 111) + steps),  # whose programs no other test has compiled
        ADAM,
        precision=name,
        gradient_accumulation_steps=steps,
        global_clipnorm=1.0,
        use_ema=True,
    )
    with counted() as counts:
        trainer.fit(class_batches(96), epochs=2, verbose=0)
    assert counts.fallbacks == []
    assert (counts["Execute"], counts["UncachedCompile"]) == (1 + 12, 1 + steps)  # 1 for the averages to begin with
    with counted() as again:
        trainer.fit(class_batches(96), epochs=2, verbose=0)
    assert (again["Execute"], again["UncachedCompile"], again["Replay"]) == (12, 0, 12)
    assert again["TransferFromDevice"] == 2 * 2  # loss and norm, at the end of each epoch


def test_float16_with_several_steps_in_one_program() -> None:
    losses = []
    for steps_per_execution in (1, 4):
        trainer = Trainer(plain(), ADAM, precision="fp16-mixed", steps_per_execution=steps_per_execution)
        losses.append(trainer.fit(class_batches(16 * 8), epochs=3, verbose=0).history["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_scale_is_saved() -> None:
    scale = LossScale(torch.device("cpu"), initial=8.0)
    other = LossScale(torch.device("cpu"))
    other.load_state_dict(scale.state_dict())
    assert other.scale == 8.0
    assert "loss_scale" in Trainer(plain(), precision=16, strategy=ON_CPU).stateful_parts()
    assert "loss_scale" not in Trainer(plain(), precision="bf16-mixed", strategy=ON_CPU).stateful_parts()


def test_names() -> None:
    assert [Precision(name).name for name in ("32-true", 32, "no", "mixed_bfloat16", "bf16-true", "mixed_float16")] == [
        "fp32", "fp32", "fp32", "bf16-mixed", "bf16", "fp16-mixed",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="unknown precision '8-bit'; the names are fp32, bf16, bf16-mixed"):
        Trainer(plain(), precision="8-bit", strategy=ON_CPU)
